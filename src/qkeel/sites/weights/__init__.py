"""The rows of the weights that make each head."""
