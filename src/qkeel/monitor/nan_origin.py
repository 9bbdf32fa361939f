"""What made the first NaN or infinity of a training run: the passes of that step are made again and looked at.

A NaN spreads to everything after it, so the layer that a record shows first is an heir. Before each optimizer step one
flag is read: whether the gradients are finite. Where they are not, the arguments of the step's passes, their random
states and the gradients at their outputs are still there, and the passes are made again, forward and backward.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from qkeel import distributed as dist
from qkeel.capture.example import (
    LastPass,
    copied,
    tensors,
    undisturbed,
)
from qkeel.capture.random_streams import RandomStreams
from qkeel.handle import Handle
from qkeel.monitor.finite_stages import (
    weights_not_finite,
)
from qkeel.patching.forward import ForwardPasses, extra_pass
from qkeel.patching.guards import FaultGuard
from qkeel.patching.held_objects import tensors_within

NOT_FOUND = (
    "gradients are not finite, and nothing in the step's passes is when they are made again: look at what changes "
    "gradients after backward, such as clipping, a hook or the reduction over processes"
)
# Of one step that are kept; of more, such as 100 micro-batches, the last ones
PASSES = 32
_OFF = "looking for the origin of a NaN failed and is off: {}. Training goes on"

# Modules whose buffers every training pass changes, beneath what versions show.
_RUNNING = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


@final
class KeptPass:
    """What is needed to make a pass again, and the gradients that reached its outputs."""

    def __init__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._last = LastPass(device.type, args, kwargs, model.training)
        self.args, self.kwargs = self._last.args, self._last.kwargs
        self.output_grads: dict[int, Tensor] = {}
        self._streams = RandomStreams(model.parameters())
        self._buffers = [
            (buffer, buffer.detach().clone())
            for module in model.modules()
            if isinstance(module, _RUNNING)
            for buffer in module.buffers(recurse=False)
        ]

    @contextmanager
    def restored(self, model: nn.Module) -> Iterator[None]:
        """A context with the random states, running statistics and autocast of the pass; all are put back after it."""
        # Compiled code would not run the hooks that look at each module.
        eager = torch.compiler.set_stance("force_eager")
        with (
            extra_pass(self),
            undisturbed(model, runs_gradient_hooks=True),
            eager,
            torch.inference_mode(False),
            torch.enable_grad(),
            self._last.setting(model),
        ):
            self._streams.restore()
            with torch.no_grad():
                for buffer, value in self._buffers:
                    buffer.copy_(value)
            yield


@final
class NanOrigin(Handle):
    """Watches the optimizer steps of a model and names the origin of the first gradient that is not finite.

    The flag before each optimizer step waits for the device once. Until the step, the arguments of its passes and the
    gradients at their outputs stay in memory.

    Args:
        model: the model that is trained.
        optimizers: its optimizers.
        report: called once, with a sentence.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> optimizer, sentences = torch.optim.SGD(model.parameters()), []
    >>> with NanOrigin(model, [optimizer], sentences.append):
    ...     model(torch.tensor([[1.0, torch.nan]])).sum().backward()
    ...     optimizer.step()
    >>> sentences
    ['NaN began in the data: argument 0 at [0, 1]']
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        report: Callable[[str], None],
    ) -> None:
        self.guard = FaultGuard(_OFF, forks=False)
        self._report = report
        self._passes: collections.deque[KeptPass] = collections.deque(maxlen=PASSES)
        self._running: KeptPass | None = None
        # Whether an optimizer has stepped on the passes that are kept
        self._has_stepped = False
        self._forwards = ForwardPasses(
            model, self._before, self._after, guard=self.guard, owner=self
        )
        self._model = self._forwards.inner
        hooks = [
            optimizer.register_step_pre_hook(self._before_step)
            for optimizer in optimizers
        ]
        super().__init__(functools.partial(self._detach, hooks))
        self.guard.off += [self.remove]

    def _detach(self, hooks: Sequence[Any]) -> None:
        self._forwards.remove()
        self._passes.clear()
        for hook in hooks:
            hook.remove()

    def _before(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], compiled: object
    ) -> None:
        # Passes are dropped here and not after a step, as several optimizers may step on the same passes.
        if self._has_stepped:
            self._has_stepped = False
            self._passes.clear()
        self._running = (
            KeptPass(self._model, args, kwargs) if torch.is_grad_enabled() else None
        )

    def _after(self, output: object, failed: bool) -> None:
        kept, self._running = self._running, None
        if kept is None or failed:
            return
        for i, x in enumerate(tensors_within(output)):
            if x.requires_grad:
                x.register_hook(functools.partial(self._keep_grad, kept, i))

    def _keep_grad(self, kept: KeptPass, i: int, grad: Tensor) -> None:
        if not self.active:
            return
        # A pass is kept once a gradient reaches it: references and rollouts never are.
        if not kept.output_grads:
            self._passes.append(kept)
        # Two losses of one pass add their gradients.
        grad = grad.detach()
        kept.output_grads[i] = (
            kept.output_grads[i] + grad if i in kept.output_grads else grad
        )

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: object, kwargs: object
    ) -> None:
        if self.active:
            self.guard(self._check, optimizer)

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        # GradScaler calls a fused optimizer even for a step that it skips.
        infinite = vars(optimizer).get("found_inf")
        self._has_stepped = True
        if isinstance(infinite, Tensor) and bool(infinite.any()):
            return
        grads = [
            p.grad
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        if _all_finite(grads):
            return
        sentence = find_origin(self._model, self._passes) or NOT_FOUND
        self.remove()
        self._report(sentence)


def find_origin(model: nn.Module, passes: Sequence[KeptPass]) -> str:
    """Makes passes again, in order, and says what in them is the first that is not finite; "" if nothing is."""
    # A weight that is NaN makes every number after it NaN, whatever the batch is.
    for name in weights_not_finite(model):
        return f"NaN began in a weight: {name} is not finite before the step"
    for kept in passes:
        for argument, value in [*enumerate(kept.args), *kept.kwargs.items()]:
            for x in filter(_is_bad, tensors(value)):
                return (
                    f"NaN began in the data: argument {argument!r} at {_first_place(x)}"
                )
        if sentence := _origin_in_pass(model, kept):
            return sentence
    return ""


def _origin_in_pass(model: nn.Module, kept: KeptPass) -> str:
    """Runs a pass forward, and backward from the gradients at its outputs, and names the first module that made a
    number that is not finite from numbers that are."""
    trace = _Trace()
    with kept.restored(model), ExitStack() as undo:
        trace.attach(model, undo)
        try:
            output = model(*copied(kept.args), **copied(kept.kwargs))
        except _BadOutputError as bad:
            # Another pass follows, whose outputs need no look.
            undo.close()
            if bad.name == "" and bad.output.ndim == 0:
                return "NaN began in the loss, which the model computes from finite outputs"
            name = bad.name or type(model).__name__
            return (
                f"NaN began in {name}: its output is the first that is not finite, at {_first_place(bad.output)}, and its "
                "inputs are finite"
            )
        for grad in kept.output_grads.values():
            if not _is_finite(grad):
                return (
                    f"NaN began in the loss: the model's output is finite, and the gradient at it is not, at "
                    f"{_first_place(grad)}"
                )
        outputs = tensors_within(output)
        indices = [i for i in kept.output_grads if i < len(outputs)]
        torch.autograd.grad(
            [outputs[i] for i in indices],
            [p for p in model.parameters() if p.requires_grad],
            [kept.output_grads[i] for i in indices],
            allow_unused=True,
        )
    name = trace.backward_origin()
    if name is None:
        return ""
    return (
        f"NaN began in the backward of {name or type(model).__name__}: its output and the gradient at it are finite, "
        "the gradient at its input is not"
    )


class _BadOutputError(BaseException):
    """Ends a pass at the first output that is not finite; no Exception, so that no model handles it."""

    def __init__(self, name: str, output: Tensor) -> None:
        super().__init__(name)
        self.name, self.output = name, output


@final
class _Trace:
    """The calls of modules in a pass, in the order in which they end, and whether the gradients there are finite."""

    def __init__(self) -> None:
        self._calls: list[str] = []
        self._bad_grads: set[tuple[int, str]] = set()

    def attach(self, model: nn.Module, undo: ExitStack) -> None:
        """Puts hooks on all modules until `undo` is closed."""
        for name, module in model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                hook = functools.partial(self._look, name, undo)
                handle = module.register_forward_hook(hook, with_kwargs=True)
                undo.callback(handle.remove)

    def _look(
        self,
        name: str,
        undo: ExitStack,
        module: nn.Module,
        args: object,
        kwargs: object,
        output: object,
    ) -> None:
        inputs, outputs = list(tensors((args, kwargs))), tensors_within(output)
        for x in filter(_is_bad, outputs):
            if not any(map(_is_bad, inputs)):
                raise _BadOutputError(name, x)
        number = len(self._calls)
        self._calls.append(name)
        # A weight counts as an input; the hook of one that several modules share sees one gradient of each.
        leaves = [p for p in module.parameters(recurse=False) if p.requires_grad]
        inner = [x for x in inputs if x.requires_grad and not x.is_leaf]
        for side, values in (("input", inner + leaves), ("output", outputs)):
            for x in values:
                if x.requires_grad:
                    hook = functools.partial(self._look_at_grad, (number, side))
                    undo.callback(x.register_hook(hook).remove)

    def _look_at_grad(self, key: tuple[int, str], grad: Tensor) -> None:
        if not _is_finite(grad):
            self._bad_grads.add(key)

    def backward_origin(self) -> str | None:
        """The module whose backward made the first gradient that is not finite: the last and innermost one whose
        gradient at the output is finite and whose gradient at the input or a weight is not."""
        makers = [
            name
            for number, name in enumerate(self._calls)
            if (number, "input") in self._bad_grads
            and (number, "output") not in self._bad_grads
        ]
        for name in reversed(makers):
            prefix = f"{name}." if name else ""
            if not any(x != name and x.startswith(prefix) for x in makers):
                return name
        return None


def _all_finite(grads: Sequence[Tensor]) -> bool:
    """Whether all gradients are finite, with one wait for the device."""
    local = [dist.local(grad) for grad in grads]
    dense = [grad.coalesce().values() if grad.is_sparse else grad for grad in local]
    if not dense:
        return True
    # The largest magnitude of a tensor is not finite as soon as one entry is not, in one launch for many tensors.
    norms = torch._foreach_norm(dense, torch.inf)
    flags = torch.stack([norm.to(norms[0].device).isfinite() for norm in norms])
    return bool(flags.all())


def _is_finite(x: Tensor) -> bool:
    return bool(dist.local(x).isfinite().all())


def _is_bad(x: Tensor) -> bool:
    """Whether a tensor has a NaN or +infinity; -infinity is what masks are made of."""
    local = dist.local(x)
    return bool((local.isnan() | (local == torch.inf)).any())


def _first_place(x: Tensor) -> list[int]:
    """The indices of the first entry that is not finite."""
    bad = ~dist.local(x).isfinite()
    return [int(i) for i in bad.nonzero()[0]] if bool(bad.any()) else []
