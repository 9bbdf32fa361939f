"""Faster ways to the same numbers. No kernel knows of another, and none uses the reference implementation."""
