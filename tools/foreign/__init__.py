"""Attention of other people's packages, and random attention, against a reference that knows nothing of qkeel."""
