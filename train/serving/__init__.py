"""A drafter as servers see it: decoded with the target, measured, exported."""
