"""`qkeel.watch`: the checked way to a Monitor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from qkeel import dist
from qkeel.capture.example import arguments
from qkeel.dist.sharding import Layout
from qkeel.errors import AlreadyAppliedError, InvalidTypeError, InvalidValueError, RefusedError
from qkeel.monitor.cadence import Cadence, cadence
from qkeel.monitor.history import PlannedRates
from qkeel.monitor.measure import Wanted, wanted
from qkeel.monitor.monitor import Monitor, watched
from qkeel.monitor.rules import Rule
from qkeel.monitor.sinks import RunDirectorySink, Sink
from qkeel.monitor.sinks import sinks as named_sinks
from qkeel.monitor.token_classes import Classes, GivenClasses, MaskSource, QueryMaskSource
from qkeel.sites.find import Models, named_models, sites_of_each

K = TypeVar("K")


def watch(
    model: Models,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    every: int | Cadence = 1,
    stats: Wanted | str = True,
    sinks: Sink | str | Path | Sequence[Sink | str | Path] = (),
    rules: Rule | Sequence[Rule] | None = None,
    query_mask: MaskSource | None = None,
    classes: GivenClasses | Classes | None = None,
    probe: object = None,
    planned: PlannedRates | None = None,
    sites: object = None,
    layout: Layout | None = None,
) -> Monitor:
    """Watch every attention of a model, per layer and head, without changing one bit of what it computes.

    >>> from qkeel.nn import Attention
    >>> with watch(Attention(d_model=8, n_heads=2)) as monitor:
    ...     monitor.alarms
    []

    Args:
        model: any module; compiled, wrapped in DistributedDataParallel or sharded ones too, or a stage of a pipeline.
            Or several models as one, each of which is called by itself, such as all stages that this process has, or an
            encoder and a decoder: a list, or a dict by name. Names of sites then begin with the model's place or name;
            those of stages are numbered over all processes. The loss is that of the last model that has one.
        optimizer: what steps it. With one, a step is one of its steps and the weights behind the heads are read too;
            without one, each forward pass is a step or, with several models, one pass of each.
        every: n measures every n-th step; or a cadence: LogSpaced(per_decade=20), Adaptive(least=5, most=100).
        stats: True for everything in LogitStats, by a pass over the logits of each measured call. "entropy" for the
            largest logit and the entropy of each head (and entropy_min, n_queries), which the compiled attention of
            qkeel's own modules finds while it attends, so that every step can be measured; n_pairs is 0 then, and
            statistics that count pairs, products or keys are not measured. A call that another kernel computes is
            measured in full. "entropy:sample=16" or 32 is for GPUs: the entropy from one of so many query rows, in
            strata of positions, with half the width of a 95 % interval as entropy_error, and no entropy_min; the
            largest logit stays exact, from all rows. Where no kernel samples, and in sequences of under 4 · 16 or 4 ·
            32 tokens, all rows count and there is no entropy_error. "max" for the exact largest logit of each head and
            nothing else, which costs less than half of everything, and nothing where the compiled attention of qkeel's
            own modules finds it while it attends. Alarms of entropy and norms are silent then. More is measured if it
            is named after one of these, or after "all", as in "all+gates": `gates` are the mean and spread of each
            row's logsumexp and, of learned sinks, the sink's logit and the gate σ(logsumexp - sink logit), by a further
            pass over the logits of each measured training call. `updates` are the spectra of what each measured step
            adds to W_QᵀW_K, and the ratio of step to weight, by a copy of the q and k weights and small QR and singular
            value decompositions in float64. `residual` are the numbers of records.BLOCK_FIELDS of each measured
            training
            pass: size and largest channel of what enters and leaves each block, and the share that attention and MLP
            add; the first measured pass is preceded by one more, which shows what modules add to the stream.
        sinks: where the numbers go besides memory: "tensorboard", "wandb:project=gpt", "mlflow", "trackio", "csv",
            "parquet" or "log", as on the command line; paths of run directories for `qkeel report`, as Path or as text
            with a / in it; or Sink objects.
        rules: the alarm rules; each warns once. None means the default rules and those of `monitor.rules_for` that fit
            the model (number format, kernel, head width, norms); an empty list means none.
        query_mask: which query rows count, [b t]: the name of the forward's argument that holds it
            ("attention_mask"), a function of the forward's arguments, or the tensor.
        classes: which token is of which class, such as text and image: a dict of token ids by class name, the name of
            an argument of the forward that holds class numbers or is true at class 1, a function of its arguments or a
            tensor [b t]; see `monitor.Classes`, which gives names too. Statistics are then also split by class:
            `read()[site].classes`.
        probe: a batch, as a tensor, a tuple of the forward's arguments or a dict of its keyword arguments; with it the
            change of its logits by each measured step is measured, by two extra passes without gradients. Not for
            several models.
        planned: the learning rates of the run, if known; with them alarms come earlier and forecasts follow the
            schedule.
        sites: what `find_sites` found earlier, on this model before it was sharded or its heads were split; for several
            models one each, as a list or a dict by name. None to find them in the first measured pass.
        layout: the place of this process among those of the run, where torch's own wrappers do not show it.

    Returns: the Monitor: `read()`, `table()`, `alarms`, `close()`, `remove()`; a context manager. With an optimizer,
        `close()` and the end of `with` measure how the training ended; see `Monitor.measure_end`.

    Raises:
        InvalidTypeError: an argument is something else.
        InvalidValueError: the optimizer holds none of the model's parameters, the forward takes no `query_mask`,
            classes are asked for with stats="entropy" or "max", updates without an optimizer, there is no model, or one
            is given twice.
        RefusedError: the model is wrapped in FullyShardedDataParallel (FSDP1), the sites are those of another model, a
            probe batch is given for several models.
        MissingLibraryError: a sink needs a library that is not installed.
        UnknownNameError: stats is something else, or no sink has this name.
        AlreadyAppliedError: the model is watched already.
    """
    models = named_models(model, "watch")
    if any(dist.is_flat(wrapper) for one in models.values() for wrapper in dist.wrappers(one)):
        raise RefusedError(
            "expected fully_shard, DistributedDataParallel or a plain model; FullyShardedDataParallel (FSDP1) keeps "
            "flat pieces of weights, from which no head can be read. Move to torch.distributed.fsdp.fully_shard"
        )
    if wanted(stats)[0] is not True and classes is not None:
        raise InvalidValueError(f"expected stats=True with classes: what {stats=} measures is not split by class")
    if planned is not None and not isinstance(planned, PlannedRates):
        raise InvalidTypeError(f"expected PlannedRates.of(rates) as the plan, got {type(planned).__name__}")
    if probe is not None and "" not in models:
        raise RefusedError("a probe batch shows the logits of one model: leave probe out, or watch that model alone")
    if "updates" in wanted(stats)[1] and optimizer is None:
        raise InvalidValueError(f"expected an optimizer with {stats=}: what a step adds is read around its steps")
    if any(map(watched, models.values())):
        raise AlreadyAppliedError("this model is watched already; remove() the first monitor, or read from that one")
    return Monitor(
        models,
        None if optimizer is None else _optimizer(optimizer, [*models.values()]),
        every=cadence(every),
        stats=stats,
        sinks=[
            one
            for given in _several(sinks, (Sink, str, Path), "sinks, their names or paths of run directories")
            for one in _sinks(given)
        ],
        rules=None if rules is None else _several(rules, (Rule,), "rules, such as qkeel.monitor.DEFAULT"),
        query_mask={} if query_mask is None else {n: QueryMaskSource.on(one, query_mask) for n, one in models.items()},
        classes={} if classes is None else {n: Classes.on(one, classes) for n, one in models.items()},
        probe=None if probe is None else arguments(probe, "probe batch"),
        planned=planned,
        sites=sites_of_each(sites, models),
        layout=layout,
    )


def _several(given: object, kinds: tuple[type[K], ...], what: str) -> tuple[K, ...]:
    """One or a sequence of these kinds, as a tuple."""
    if isinstance(given, kinds):
        return (given,)
    if not isinstance(given, Sequence):
        raise InvalidTypeError(f"expected {what}, got {type(given).__name__}; () for none")
    for one in given:
        if not isinstance(one, kinds):
            raise InvalidTypeError(f"expected {what}, got {type(one).__name__} among them")
    return tuple(given)


def _sinks(given: Sink | str | Path) -> tuple[Sink, ...]:
    """The sinks that one entry asks for: a text names some, or is the path of a run directory."""
    if isinstance(given, Sink):
        found: tuple[Sink, ...] = (given,)
    else:
        found = named_sinks(given) if isinstance(given, str) else (RunDirectorySink(given),)
    for one in found:
        one.require()
    return found


def _optimizer(given: object, models: Sequence[nn.Module]) -> torch.optim.Optimizer:
    """The optimizer whose step hooks run: inside the wrapper that accelerate puts around it."""
    if not isinstance(given, torch.optim.Optimizer):
        raise InvalidTypeError(
            f"expected a torch.optim.Optimizer, got {type(given).__name__}; leave it out if there is none"
        )
    inner = vars(given).get("optimizer")
    optimizer = inner if isinstance(inner, torch.optim.Optimizer) else given
    own = {id(p) for model in models for p in model.parameters()}
    if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
        raise InvalidValueError(
            "the optimizer holds none of the model's parameters; give the one that trains this model, "
            "made from model.parameters()"
        )
    return optimizer
