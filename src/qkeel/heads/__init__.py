"""Finds and verifies the weights from which each head of an attention layer is computed, and the norms between these
weights and the logits."""
