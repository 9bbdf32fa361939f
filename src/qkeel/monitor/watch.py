"""`qkeel.watch`, which checks its arguments and creates a Monitor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from qkeel import distributed as dist
from qkeel.capture.example import arguments
from qkeel.deprecation import accepts_earlier_calls
from qkeel.distributed.layout import Layout
from qkeel.errors import (
    AlreadyAppliedError,
    InvalidTypeError,
    InvalidValueError,
    RefusedError,
    caution,
)
from qkeel.monitor.cadence import Cadence, cadence
from qkeel.monitor.call_statistics import wanted
from qkeel.monitor.forecast import PlannedRates
from qkeel.monitor.monitor import Monitor, watched
from qkeel.monitor.rules import Rule
from qkeel.monitor.sinks import RunDirectorySink, Sink
from qkeel.monitor.sinks import sinks as named_sinks
from qkeel.monitor.token_classes import Classes, ClassSource, MaskSource, PassTokens
from qkeel.patching.optimizers import listed
from qkeel.sites.find import named_models, sites_of_each

K = TypeVar("K")
_IN_BACKWARD = (
    "each weight is updated in the backward pass, so the norms of weights at a step are those after its update; logits "
    "are those before"
)


@accepts_earlier_calls()
def watch(
    model: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    every: int | Cadence = 1,
    stats: bool | str = True,
    sinks: Sink | str | Path | Sequence[Sink | str | Path] = (),
    rules: Rule | Sequence[Rule] | None = None,
    query_mask: MaskSource | None = None,
    classes: ClassSource | Classes | None = None,
    probe_batch: object = None,
    planned: PlannedRates | None = None,
    sites: object = None,
    layout: Layout | None = None,
    nan: bool = False,
) -> Monitor:
    """Watches the attention of a model, per layer and head, without changing a single bit of what the model computes.

    >>> from qkeel.nn import Attention
    >>> with watch(Attention(d_model=8, n_heads=2)) as monitor:
    ...     monitor.alarms
    []

    Args:
        model: any module; it may be compiled, wrapped in DistributedDataParallel, sharded, or one stage of a pipeline.
            A list of models, or a dict of models by name, is watched as one model, for example all pipeline stages of
            this process, or an encoder and a decoder that are called separately. The names of sites then begin with the
            model's index or name; pipeline stages are numbered across all processes. The loss is taken from the last
            model that returns one.
        optimizer: the optimizer that updates the model. If it is given, a step is an optimizer step, and the weights
            behind the heads are read too; otherwise, a step is a forward pass (with several models, one pass of each).
            Of several optimizers, such as Muon and AdamW, the first one counts the steps: list the one with the query
            and key weights first. A resumed run continues at the step that any of them has in its state.
        every: a number n to measure every n-th step, or a cadence such as LogSpaced(per_decade=20) or Adaptive(least=5,
            most=100).
        stats: which statistics are measured. One of:

            - True: everything in LogitStats, computed in a pass over the logits of each measured call.
            - "max": the exact largest logit of each head and nothing else, for less than half the cost of True, or at
              no cost if the compiled attention of qkeel's own modules computes it. Alarms about entropy and norms are
              then not raised.

            These can be added to one of the above or to "all", as in "all+gates":

            - `gates`: the mean and the minimum of each row's logsumexp and, for learned sinks, the sink's logit and the gate
              σ(logsumexp - sink logit), computed in another pass over the logits of each measured training call; and
              the mean gate of each head's output, where that is multiplied by a sigmoid.
            - `updates`: the spectra of what each measured step adds to W_QᵀW_K, and the ratio of the step to the
              weight, computed from a copy of the q and k weights with small QR and singular value decompositions in
              float64.
            - `residual`: the statistics in records.BLOCK_FIELDS for each measured training pass: the size and the
              largest channel of the hidden states that enter and leave each block.
            - `chosen`: how much of dense attention the keys that sparse attention chooses retain (recall and
              divergence), and the divergence of an indexer's scores from it, in each measured training pass, for up to
              32 rows of each call.
        sinks: where the numbers are recorded besides memory: "tensorboard", "wandb:project=gpt", "mlflow", "trackio",
            "csv" or "log", as on the command line; the paths of run directories for `qkeel report`, as Path
            objects or as strings that contain a /; or Sink objects.
        rules: the alarm rules; each warns once. None uses the default rules and the rules from `monitor.rules_for` that
            fit the model (number format, kernel, head width, norms); an empty list turns alarms off.
        query_mask: which query rows count, [b t]: the name of the forward's argument that contains the mask
            ("attention_mask"), a function of the forward's arguments, or the tensor itself. None counts every row,
            those of padding too.
        classes: the class of each token, such as text and image: a dict of token ids by class name, the name of a
            forward argument that contains class numbers or is true for class 1, a function of the arguments, or a
            tensor [b t]; use `monitor.Classes` to name the classes as well. Statistics are then also split by class,
            see `read()[site].classes`.
        probe_batch: a batch, as a tensor, a tuple of the forward's arguments or a dict of its keyword arguments. How
            much each measured step changes its logits is then recorded, at the cost of two extra passes without
            gradients. Only one model can be probed.
        planned: the learning rates of the run, if known; alarms are then raised earlier, and forecasts follow the
            schedule.
        sites: the result of an earlier `find_sites` call on this model, from before it was sharded or its heads were
            split; for several models, one result for each, as a list or a dict by name. If None, the sites are found in
            the first measured pass.
        layout: this process's position in the parallel layout, if torch's own wrappers do not reveal it.
        nan: whether to name what made the first NaN or infinity: a module, a row, the data, the loss, the backward of a
            module. Before each optimizer step one flag is read, for which the host waits for the device, and the
            step's batches stay in memory until then; only a step whose gradients are not finite is made again. For a
            single model whose weights are not sharded.

    Returns:
        The Monitor, with `read()`, `table()`, `alarms`, `close()` and `remove()`, which is also a context manager.

    Raises:
        InvalidTypeError: an argument has the wrong type.
        InvalidValueError: the optimizer does not contain any of the model's parameters, the forward does not take the
            argument named by `query_mask` or `classes`, classes are combined with statistics other than True, updates
            are requested without an optimizer, no model is given, or a model is given twice.
        RefusedError: the sites are those of another model, or a probe batch is given for several models.
        MissingLibraryError: a sink needs a library that is not installed.
        UnknownNameError: the statistics do not exist, or no sink has this name.
        AlreadyAppliedError: the model is already watched.
    """
    models = named_models(model)
    found_before = sites_of_each(sites, models)
    optimizers = _training(optimizer, [*models.values()])
    if wanted(stats)[0] is not True and classes is not None:
        raise InvalidValueError(
            f"expected stats=True with classes, because what {stats=} measures is not split by class"
        )
    if planned is not None and not isinstance(planned, PlannedRates):
        raise InvalidTypeError(
            f"expected planned=PlannedRates.of(rates), got {type(planned).__name__}"
        )
    if probe_batch is not None and "" not in models:
        raise RefusedError(
            "a probe batch shows the logits of one model only; leave out probe_batch, or watch only that model"
        )
    if "updates" in wanted(stats)[1] and optimizer is None:
        raise InvalidValueError(
            f"expected an optimizer with {stats=}, because updates are measured before and after its steps"
        )
    # Two monitors of one model would count each pass twice.
    if any(map(watched, models.values())):
        raise AlreadyAppliedError(
            "this model is already watched; remove() the first monitor, or use that one"
        )
    if nan and (
        optimizer is None
        or "" not in models
        or any(map(dist.is_split, models[""].parameters()))
        or dist.hides_weights(models[""])
    ):
        raise RefusedError(
            "expected an optimizer and one model whose weights are not sharded with nan=True, because the step's pass "
            "is made again on this process; leave out nan=True, or train one process until the NaN appears"
        )
    destinations: list[Sink] = []
    expected = "sinks, their names or paths of run directories"
    for entry in _several(sinks, (Sink, str, Path), expected):
        if isinstance(entry, Path):
            destinations.append(RunDirectorySink(entry))
        else:
            destinations += named_sinks(entry) if isinstance(entry, str) else [entry]
    for sink in destinations:
        # A missing library is an error now, not a fault in the first step.
        sink.require()
    monitor = Monitor(
        models,
        optimizers,
        every=cadence(every),
        stats=stats,
        sinks=destinations,
        rules=None
        if rules is None
        else _several(rules, (Rule,), "rules, such as qkeel.monitor.DEFAULT"),
        tokens={n: PassTokens(x, query_mask, classes) for n, x in models.items()},
        probe=None if probe_batch is None else arguments(probe_batch, "probe batch"),
        planned=planned,
        sites=found_before,
        layout=layout,
    )
    if nan:
        monitor.trace_nan(_inner_optimizers(optimizer))
    return monitor


def _several(value: object, kinds: tuple[type[K], ...], expected: str) -> tuple[K, ...]:
    """Returns an object of one of these types, or a sequence of such objects, as a tuple."""
    entries: list[K] = []
    for entry in value if isinstance(value, (list, tuple)) else (value,):
        if not isinstance(entry, kinds):
            raise InvalidTypeError(
                f"expected {expected}, got {type(entry).__name__}; pass () for none"
            )
        entries.append(entry)
    return tuple(entries)


def _inner_optimizers(optimizer: object) -> list[torch.optim.Optimizer]:
    """Returns the optimizers whose step hooks run: those inside the wrapper that accelerate adds."""
    optimizers = []
    for entry in listed(optimizer):
        inner = vars(entry).get("optimizer")
        optimizers.append(inner if isinstance(inner, torch.optim.Optimizer) else entry)
    return optimizers


def _training(
    optimizer: object, models: Sequence[nn.Module]
) -> list[torch.optim.Optimizer]:
    """Returns the optimizers that train the models; the first counts the steps."""
    weights = {id(p) for model in models for p in model.parameters()}
    inner = _inner_optimizers(optimizer)
    for entry, of_steps in zip(listed(optimizer), inner):
        # transformers' dummy counts the steps of optimizers that step in the backward pass.
        in_backward = getattr(of_steps, "optimizer_dict", None) or ()
        stepped = [p for group in entry.param_groups for p in group["params"]]
        if not weights.isdisjoint(map(id, in_backward)):
            caution(_IN_BACKWARD)
        # DeepSpeed's ZeRO gives an optimizer flat pieces in place of the model's parameters.
        elif weights.isdisjoint(map(id, stepped)) and not any(
            map(dist.zero_stage, models)
        ):
            raise InvalidValueError(
                "the optimizer does not contain any of the model's parameters; pass the optimizer that trains this "
                "model, created from model.parameters()"
            )
    return inner
