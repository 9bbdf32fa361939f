"""Faster ways to the same numbers. No kernel knows another, none sees the oracle."""
