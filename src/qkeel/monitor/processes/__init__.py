"""Measurement by all processes of one run as one."""
