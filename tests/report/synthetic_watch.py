"""Made-up runs of a watched model, written by the sink that a monitor writes with."""

from __future__ import annotations

import dataclasses

import numpy as np

from qkeel.monitor import Alarm, RunDirectorySink, Sample, Severity


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a made-up run looks like: logits grow as step^power, half by the norms; some layers have fewer heads."""

    layers: int = 12
    heads: int = 12
    samples: int = 60
    every: int = 10
    power: float = 0.55
    end: float = 260.0
    alarms: int = 2
    complete: bool = True
    loss: bool = True
    angle: bool = True
    evaluated: bool = True
    seed: int = 0
    model: str = "GPT2LMHeadModel"


def make_watch(path, seen=Seen()):
    """Write one directory as a Monitor would."""
    names = tuple(f"transformer.h.{i}.attn" for i in range(seen.layers))
    sink = RunDirectorySink(path)
    sink.open(about(seen, names))
    rng = np.random.default_rng(seen.seed)
    share = (
        rng.uniform(0.15, 0.9, (seen.layers, seen.heads))
        * np.linspace(0.4, 1.0, seen.layers)[:, None]
    )
    share[seen.layers // 3, min(5, seen.heads - 1)] = 1.0
    for i in range(seen.samples):
        one = sample(seen, names, share, i, rng)
        sink.write(one)
        if seen.evaluated and i % 20 == 10:
            sink.write(dataclasses.replace(one, phase="eval"))
        if seen.alarms and i == seen.samples // 3:
            for raised in alarms(one, names)[: seen.alarms]:
                sink.alarm(raised)
    sink.close(seen.complete)
    assert sink.path is not None
    return sink.path


def about(seen, names):
    """What a Monitor says of what it watches."""
    site = {
        "n_heads": seen.heads,
        "n_kv_heads": seen.heads,
        "head_dim": 64,
        "how": "scaled_dot_product_attention",
    }
    return {
        "model": seen.model,
        "parameters": 124_439_808,
        "sites": [{"name": name, **site} for name in names],
        "optimizer": "AdamW",
        "cadence": f"every {seen.every} steps",
        "versions": {"qkeel": "0.1.0", "torch": "2.13.0", "python": "3.11.2"},
        "command": "python train.py --config small.toml",
    }


def sample(
    seen,
    names,
    share,
    i,
    rng,
):
    """The i-th sample."""
    step = i * seen.every
    top = (
        seen.end
        * (max(step, 1) / max(1, seen.every * (seen.samples - 1))) ** seen.power
    )
    logit = (
        top
        * share ** (0.2 + i / seen.samples)
        * np.exp(rng.normal(0, 0.02, share.shape))
    )
    length = np.sqrt(8 * logit ** (0.8 if seen.angle else 1.0))
    heads = {
        "max_logit": logit,
        "min_logit": -0.8 * logit,
        "entropy": np.clip(4.6 - 0.8 * np.log1p(logit), 0.02, None),
        "query_norm": length * 1.1,
        "key_norm": length * 0.9,
    }
    if seen.angle:
        heads["cos_max"] = np.clip(
            2.4 * logit / length**2 * rng.uniform(0.7, 1.1, logit.shape), -1, 1
        )
        heads["logit_change_rms"] = 0.02 * logit if i else np.full_like(logit, np.nan)
    if seen.layers > 2 and seen.heads > 1:
        heads = {name: _ragged(values) for name, values in heads.items()}
    values = {
        "lr": 3e-4,
        "max_logit": float(np.nanmax(heads["max_logit"])),
        "entropy": float(np.nanmean(heads["entropy"])),
    }
    if seen.loss:
        values["train_loss"] = 10.8 * (i + 1) ** -0.28 + 0.03 * float(rng.normal())
    return Sample(step=step, values=values, layers=names, heads=heads)


def _ragged(values):
    out = values.copy()
    out[1, values.shape[1] // 2 :] = np.nan
    return out


def alarms(one, names):
    """Two alarms with places, trends and remedies."""
    place = {"step": one.step, "layer": names[len(names) // 3], "head": 5}
    hold = 'qkeel.apply(model, "qk_clip:threshold=15,steps=matched", optimizer)'
    trend = "it was 3.85 at step 0, and it grows by a factor of 1.5 each time the training length doubles"
    kimi = "Kimi K2, arXiv 2507.20534, section 2.1: the threshold of QK-Clip"
    notice = Alarm(
        rule="ceiling 100", severity=Severity.NOTICE, value=104.0, meaning="max logit 104 is over 100", trend=trend,
        remedy=hold, source=kimi, **place,
    )  # fmt: skip
    harm = "Wortsman et al. 2023, arXiv 2309.14322: with transplanted logits of 1e3 the loss degrades"
    meaning = "max logit 104 will pass 1,000 at step 2,140 ± 200 (90 % interval 1,950 to 2,340)"
    alarm = dataclasses.replace(
        notice,
        rule="forecast 1000",
        severity=Severity.ALARM,
        meaning=meaning,
        source=harm,
    )
    return [notice, alarm]
