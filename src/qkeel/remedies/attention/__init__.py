"""Remedies that change the attention call: how a call is exchanged, where new parameters and norms go."""
