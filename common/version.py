"""This project's version, from its installed metadata."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("draftcache")
except PackageNotFoundError:  # run from a checkout with PYTHONPATH=.src
    VERSION = "0+checkout"
