"""Made-up samples, alarms and descriptions of what is watched."""

import numpy as np

from qkeel.monitor import Alarm, Sample, Severity

LAYERS = ("h.0.attn", "h.1.attn")


def sample(step, *, phase="train", **heads):
    """Two layers, of 3 and of 2 heads; fields given as [[a, b, c], [d, e]]."""
    found = {
        "max_logit": [[1.0, 2.0, 3.0], [4.0, 14.23]],
        "entropy": [[2.0, 3.0, 4.0], [1.0, 2.0]],
        **heads,
    }
    arrays = {
        name: np.array([[*row, *[np.nan] * (3 - len(row))] for row in rows])
        for name, rows in found.items()
    }
    values = {"step": float(step), "lr": 0.1, "train_loss": 2.5, "max_logit": 14.23}
    return Sample(step=step, values=values, layers=LAYERS, heads=arrays, phase=phase)


def alarm(severity=Severity.ALARM, step=10, **rest):
    made = {
        "rule": "ceiling 1000",
        "value": 1200.0,
        "meaning": "max logit 1,200 is over 1,000",
    }
    made |= {
        "trend": "",
        "remedy": "qkeel.apply(...)",
        "source": "",
        "layer": "h.1.attn",
        "head": 1,
        **rest,
    }
    return Alarm(severity=severity, step=step, **made)


def about():
    site = {"n_kv_heads": 1, "head_dim": 4, "how": "sdpa"}
    return {
        "model": "Toy",
        "parameters": 1234,
        "sites": [
            {"name": LAYERS[0], "n_heads": 3, **site},
            {"name": LAYERS[1], "n_heads": 2, **site},
        ],
        "optimizer": "AdamW",
        "every": 1,
        "versions": {"qkeel": "0.1.0", "torch": "2.13.0"},
        "command": "python train.py",
    }
