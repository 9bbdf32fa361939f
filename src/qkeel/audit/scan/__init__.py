"""A checkpoint read head by head without running the model."""
