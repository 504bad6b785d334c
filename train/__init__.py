"""Stage two: a store in, a drafter out."""
