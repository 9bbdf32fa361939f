"""Finds and verifies the weights that make each head of an attention layer, and the norms between them and the
logits."""
