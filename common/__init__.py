"""What both stages share: the format, the store, the target. Imports neither `extract` nor `train`."""
