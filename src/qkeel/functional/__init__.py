"""Stateless functions from tensors to tensors, in which each formula is defined once."""
