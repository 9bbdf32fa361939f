"""One training run: its step, its evaluation, its checkpoints and what it records."""
