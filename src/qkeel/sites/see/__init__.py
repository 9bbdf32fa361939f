"""Observers of attention calls while a model runs, one module per kind of call."""
