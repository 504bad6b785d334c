"""One file per claim about speed in the README."""
