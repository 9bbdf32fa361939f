"""Remedies that change the blocks around attention: how residual blocks and output projections are found."""
