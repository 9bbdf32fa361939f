"""Advice from measured runs: the logits to expect, and which remedy gains how much."""
