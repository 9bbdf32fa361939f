"""The rates at which the study of transfer compares its remedies."""

import math

from experiments.studies.command import best_rates

from qkeel.lab import Grid, RunConfig, product


def test_each_remedy_gets_the_rate_of_the_lowest_mean_loss():
    grid = Grid(remedies=["none", "qk_norm"], lrs=[0.01, 0.03, 0.1], seeds=[7, 8])
    runs = product(RunConfig(), grid)
    losses = [3.0, 3.0, 1.0, 4.0, 2.6, 2.6, 2.0, 2.0, 2.0, 2.0, 1.0, math.nan]
    table = [
        {"run_id": run.config.run_id, "val_loss": loss}
        for run, loss in zip(runs, losses, strict=True)
    ]
    # Of two equal rates the lower; a loss that is not finite is the worst.
    rates = {("grid", "none"): 0.03, ("grid", "qk_norm"): 0.01}
    assert best_rates(runs, table) == rates
