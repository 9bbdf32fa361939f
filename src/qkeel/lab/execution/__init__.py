"""A plan of runs executed in one directory."""
