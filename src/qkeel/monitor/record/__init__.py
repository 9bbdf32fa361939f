"""Measurements as records, tables and files."""
