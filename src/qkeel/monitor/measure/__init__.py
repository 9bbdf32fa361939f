"""The quantities measured in a step, one quantity a file."""
