"""Runs that differ in seed, steps, rates and decay only, computed as one model with a leading run dimension.

What the runs of a stack share, and what stays each run's own:

    shared: the forward and backward pass (`stacked_modules`, `stacked_attention`), clipping and the AdamW pass
        (`choose_arithmetic`, `stacked_adamw`), and the batches of runs of one seed (`training.step.read_batches`).
    own: weights, gradients and optimizer state, which are views into the stack's; the rate and weight decay, the
        remedy with its hooks, the records and the checkpoint.

`what_runs_share` says which runs may share a stack, `choose_arithmetic` how a group of them is computed, and why.
"""
