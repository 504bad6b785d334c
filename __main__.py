from draftcache.cli import main

main()
