"""Stateless functions from tensors to tensors, in which each formula is defined once.

The files:

    norms, rope, position_biases, logits
                         what attention computes, from q and k to weights
    statistics           what is measured of the logits; class_statistics, chosen_keys
    bounds               what weights and norms say of logits, and formulas on weights
"""
