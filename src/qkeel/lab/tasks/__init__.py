"""The tasks that a model learns, one task a file."""
