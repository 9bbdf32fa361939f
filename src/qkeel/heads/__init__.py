"""The weights that make each head of an attention: found, verified, and the norms on their way."""
