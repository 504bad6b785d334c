"""Tests, one file per room; `helpers.py` builds the tiny targets and stores they use."""
