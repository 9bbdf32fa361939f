"""Remedies that act on optimizer steps: the weights of each head, and what is done to them before and after a step."""
