"""transformers: a callback for its Trainer, and qkeel's attention as an `attn_implementation`.

Shapes: b batch size, t queries, s keys, h query heads, g key heads, d head size, e value size.
"""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qkeel.autopilot import Ladder, attach
from qkeel.errors import QkeelError, RefusedError, RunDirectoryError, caution, needed
from qkeel.frames import Foreign
from qkeel.integrations.watched_training import CALLBACK_CADENCE, Sinks, WatchedTraining
from qkeel.monitor import Cadence, Rule
from qkeel.monitor.token_classes import MaskSource
from qkeel.nn import functional_attention
from qkeel.ops import attention
from qkeel.patching.modes import Kwargs
from qkeel.patching.torch_state import constant_when_compiled, running_frames
from qkeel.records import layer_fields
from qkeel.remedies.table import RemedySpec
from qkeel.spec import AttentionSpec, Fixed, NoCap, Sink, Softcap, Softmax

# `attn_implementation="qkeel"`: qkeel's attention in any transformers model, through the option of that library.

with needed("qkeel.integrations.huggingface", "transformers accelerate"):
    from transformers import MODEL_MAPPING, AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask, sdpa_mask

NAME = "qkeel"
# Tensor arguments without effect, because mask and rotation already contain them, or because only a loss uses them.
_HARMLESS = frozenset(
    {
        *(
            "position_ids",
            "cache_position",
            "cos",
            "sin",
            "cu_seq_lens_q",
            "cu_seq_lens_k",
            "seq_idx",
        ),
        *("token_type_ids", "num_items_in_batch", "shift_labels", "labels"),
    }
)
_COMPUTED = frozenset({"position_bias", "s_aux", "sinks", "indices"})


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Computes transformers' "sdpa" attention with `qkeel.nn.functional_attention`, which also supports a softcap.

    A tensor argument that is not listed here is refused if the attention module names it. If it was passed by the
    model's caller, as `num_items_in_batch` is by a Trainer, it is meant for the loss and ignored.

    Args:
        module: the attention module.
        query: [b h t d].
        key: [b g s d]; h is a multiple of g.
        value: [b g s e].
        attention_mask: boolean or additive, broadcast to [b h t s]; if None, `is_causal` decides what is visible.
        arguments: `dropout`, `scaling` (1/√d by default), `is_causal` (by default the module's attribute, else True),
            `position_bias`, which is added to the logits, `softcap`, a learned sink per head (`s_aux` [h], as in
            GPT-OSS), and the keys that an indexer chose for each query (`indices` [b t n], as in DeepSeek V3.2).

    Returns:
        The output [b t h e], and None for the weights, which are never computed.

    Raises:
        RefusedError: the model passes an argument that changes attention in another way.
    """
    _check(module, query, arguments)
    scaling, bias, causal = (
        arguments.get("scaling"),
        arguments.get("position_bias"),
        arguments.get("is_causal"),
    )
    t, s = query.shape[2], key.shape[2]
    causal = bool(vars(module).get("is_causal", True) if causal is None else causal)
    # A single query, as in decoding, sees every key of the cache.
    causal = causal and attention_mask is None and t > 1
    # Without a mask, more keys than queries mean a static cache that was empty: only its first keys are theirs.
    if causal and s > t:
        key, value = key[:, :, :t], value[:, :, :t]
        bias = None if bias is None else bias[..., :t]
    if bias is not None:
        attention_mask, causal = _biased(bias, attention_mask, causal), False
    if arguments.get("indices") is not None:
        attention_mask, causal = (
            _chosen(arguments["indices"], attention_mask, causal, s),
            False,
        )
    dropout = arguments.get("dropout", 0.0)
    # One logit per head [h]; GPT-OSS names it s_aux, other models sinks.
    sinks = (
        arguments.get("s_aux") if arguments.get("sinks") is None else arguments["sinks"]
    )
    if arguments.get("softcap") is not None or sinks is not None:
        scale = Fixed(query.shape[-1] ** -0.5 if scaling is None else scaling)
        cap = (
            NoCap()
            if arguments.get("softcap") is None
            else Softcap(arguments["softcap"])
        )
        spec = AttentionSpec(
            scale=scale, cap=cap, normalizer=Softmax() if sinks is None else Sink()
        )
        params = None if sinks is None else {"sink": sinks.view(-1, 1, 1)}
        options = {"causal": causal, "mask": attention_mask, "dropout": dropout}
        out = attention(query, key, value, spec=spec, params=params, **options)
        return out.transpose(1, 2).contiguous(), None
    share = query.shape[1] // key.shape[1]
    # Fused GPU kernels take a mask or GQA, not both.
    if share > 1 and attention_mask is not None and not query.is_cpu:
        key, value, share = (
            key.repeat_interleave(share, 1),
            value.repeat_interleave(share, 1),
            1,
        )
    gqa = share > 1
    out = functional_attention(
        query,
        key,
        value,
        attention_mask,
        dropout,
        causal,
        scale=scaling,
        enable_gqa=gqa,
    )
    return out.transpose(1, 2).contiguous(), None


def _check(module: nn.Module, query: Tensor, arguments: Kwargs) -> None:
    for name, value in arguments.items():
        unknown = (
            isinstance(value, Tensor)
            and name not in _HARMLESS | _COMPUTED
            and _names(type(module), name)
        )
        several = (
            name in ("s_aux", "sinks")
            and isinstance(value, Tensor)
            and value.numel() != query.shape[1]
        )
        chosen = name == "indices" and isinstance(value, Tensor) and value.ndim != 3
        if unknown or several or chosen or (name == "cache" and value is not None):
            raise RefusedError(
                f"{type(module).__name__} passes {name}= to its attention, which {NAME!r} does not support; "
                'load the model with attn_implementation="eager"'
            )


@constant_when_compiled
def _names(kind: type[nn.Module], argument: str) -> bool:
    """True if a module's forward names this argument in a call, or if its code cannot be read.

    In that case, the argument is passed to attention by the module itself, not by the model's caller.
    """
    forward = inspect.unwrap(kind.forward)
    if not isinstance(forward, types.FunctionType):
        return True
    # Python keeps a call's keyword names among the constants: as one tuple, or as single strings next to **kwargs.
    consts = forward.__code__.co_consts
    return any(
        argument == const or (isinstance(const, tuple) and argument in const)
        for const in consts
    )


def _chosen(indices: Tensor, mask: Tensor | None, causal: bool, keys: int) -> Tensor:
    """Returns the mask restricted to the chosen keys; `indices` is [b t n], the result [b 1 t s]."""
    b, t, _ = indices.shape
    chosen = torch.zeros(b, t, keys, dtype=torch.bool, device=indices.device).scatter(
        -1, indices.long(), True
    )[:, None]
    if mask is None:
        return (
            chosen & torch.ones(t, keys, dtype=torch.bool, device=indices.device).tril()
            if causal
            else chosen
        )
    return (
        mask & chosen
        if mask.dtype == torch.bool
        else mask.masked_fill(~chosen, torch.finfo(mask.dtype).min)
    )


def _biased(bias: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Returns the bias, with the most negative number of its dtype where the mask or causality hides a key."""
    if mask is not None and mask.dtype != torch.bool:
        return bias + mask
    if mask is None and not causal:
        return bias
    if mask is None:
        mask = torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).tril()
    # transformers hides keys with the lowest finite number; -inf in a whole row would make it NaN.
    return torch.where(mask, bias, torch.finfo(bias.dtype).min)


def mask(**arguments) -> Tensor | None:  # type: ignore[no-untyped-def]  # what transformers gives any mask
    """Returns transformers' "sdpa" mask for models that call the configured attention, or else the "eager" mask.

    The "sdpa" mask is None if only causality hides keys and otherwise boolean, which a model that implements attention
    itself would misread. Models of an unknown class get the "eager" mask.

    Raises:
        RefusedError: the model implements attention itself, so that qkeel's attention would not run.
    """
    try:
        home = MODEL_MAPPING[type(arguments["config"])]
    except KeyError:
        return eager_mask(**arguments)
    home = home[0] if isinstance(home, tuple) else home
    if home is not None and not (
        home._supports_sdpa or home._supports_attention_backend
    ):
        raise RefusedError(
            f"{home.__name__} implements its attention itself, which {NAME!r} cannot reach; load it "
            'with attn_implementation="eager", which qkeel.watch sees as well'
        )
    # A model without "sdpa" support may extend the mask for keys of its own, as DeepSeek V4 does, so it can't be None.
    return (
        sdpa_mask(**arguments)
        if home is None or home._supports_sdpa
        else eager_mask(**arguments)
    )


def register() -> str:
    """Registers `attn_implementation="qkeel"` with transformers and returns its name. May be called repeatedly."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)
    return NAME


# A callback that watches while the Trainer of transformers trains, and passes the numbers to its trackers.

with needed("qkeel.integrations.huggingface", "transformers accelerate"):
    from transformers import (
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )
    from transformers.trainer_callback import (
        CallbackHandler,
        PrinterCallback,
        ProgressCallback,
    )

_NO_TRAINER = (
    "no transformers.Trainer calls this callback, so its numbers are not sent to any tracker; they are in "
    "state.log_history and in the callback's own sinks"
)


@final
class QkeelCallback(WatchedTraining, TrainerCallback):
    """Watches from the first to the last step of `trainer.train()`; training stays bit-identical.

    Add it with `Trainer(callbacks=[QkeelCallback()])`. Numbers measured at optimizer step s go to
    `trainer.state.log_history` and to everything that `report_to` names (TensorBoard, W&B, MLflow, …), as a separate
    log entry at global step s, no matter how often the Trainer itself logs. The Trainer prints two of the numbers: the
    largest logit and the mean entropy. The last planned step is always measured.

    With `autopilot`, the callback also limits the logits of the heads that need it (`qkeel.autopilot`). Until its first
    action, training is bit-identical to training without it. Its state is part of the optimizer's checkpoints.

    With `remedy`, a remedy that acts on optimizer steps is applied to the optimizer that the Trainer has made, and stays
    for good; `handle` is its handle. A refusal is an error in the first pass, before the first step. What the remedy
    must remember is part of the optimizer's checkpoints.

    Args:
        every: see `qkeel.watch`; by default, every 50th step is measured, and every 5th step during the first 20 steps
            and while logits are changing.
        sinks: see `qkeel.watch`.
        rules: see `qkeel.watch`.
        query_mask: see `qkeel.watch`.
        per_layer: whether to log a series per layer (attn/layer_07/max_logit) in addition to the model's
            (attn/max_logit); W&B shows both under train/.
        autopilot: True for the default policy, or a policy.
        remedy: remedies on optimizer steps, such as "qk_clip:threshold=15,steps=matched" or "lalr:tau=0.1".

    Raises:
        InvalidValueError: the remedy changes the model itself, or an autopilot is given too.
    """

    def __init__(
        self,
        *,
        every: int | Cadence = CALLBACK_CADENCE,
        sinks: Sinks = (),
        rules: Sequence[Rule] | None = None,
        query_mask: MaskSource | None = "attention_mask",
        per_layer: bool = True,
        autopilot: bool | str | Ladder = False,
        remedy: RemedySpec | None = None,
    ) -> None:
        super().__init__(every, sinks, rules, query_mask, autopilot, remedy)
        self._per_layer = per_layer
        self._handler: CallbackHandler | None = None
        # Of the micro-batches of the current step.
        self._losses: list[Tensor] = []

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Foreign,
    ) -> None:
        """Starts watching; a resumed run continues the step count."""
        # a previous training may have ended with an error.
        self.close(complete=False)
        model: nn.Module = kwargs["model"]
        optimizer: Optimizer = kwargs["optimizer"]
        self._handler = _calling_handler(self)
        if self._handler is None:
            caution(_NO_TRAINER)
        else:
            callbacks = [
                type(callback).__name__ for callback in self._handler.callbacks
            ]
            self._leave_out(
                {name.removesuffix("Callback").lower() for name in callbacks}
            )
        try:
            self._watch(state, model, optimizer)
        except (OSError, RunDirectoryError):
            # Where nothing can be written is said before hours of training, not after.
            raise
        except QkeelError as error:
            # Training is the user's aim and must not end for want of its numbers.
            caution(
                f"attention is not watched, and training goes on without it: {error}"
            )
            self.close(complete=False)
            self.monitor = self.pilot = None
        self._apply(model, [optimizer])

    def _watch(
        self, state: TrainerState, model: nn.Module, optimizer: Optimizer
    ) -> None:
        monitor = self._begin(model, optimizer, state.global_step)
        if self._policy is not False:
            self.pilot = attach(monitor, optimizer, policy=self._policy)

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Follows the Trainer's step count, which includes steps that a GradScaler skips, and measures the last
        step."""
        self._losses = []
        if self.monitor is not None:
            self.monitor.steps = max(self.monitor.steps, state.global_step)
            if state.global_step + 1 == state.max_steps:
                self.monitor.measure_next()

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Records the Trainer's loss, which may be another than the one that the model returns."""
        self.on_substep_end(args, state, control)
        if self.monitor is not None and self._losses:
            self.monitor.note_loss(torch.stack(self._losses).sum())

    def on_substep_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Reads the loss of a micro-batch."""
        loss = _loss_of_micro_batch()
        if loss is not None:
            self._losses.append(loss)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Logs the numbers that have arrived from the device."""
        self._send(args, state, control)

    on_epoch_end = on_step_end

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Logs everything that was measured, because the Trainer logs one last time before its trackers close."""
        # Reading `sample` waits for pending ones.
        if self.monitor is not None and self.monitor.sample is not None:
            self._send(args, state, control)

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Stops watching."""
        self.close(complete=True)

    def _send(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl
    ) -> None:
        for sample in self._queue.take():
            numbers = sample.summaries(None if self._per_layer else ())
            if not self._per_layer:
                numbers = {
                    key: v
                    for key, v in numbers.items()
                    if key.rpartition("/")[2] in layer_fields()
                }
            if sample.phase == "eval":
                # The Trainer's trackers show names that begin with eval_ beside its own evaluations.
                numbers = {
                    f"eval_{key.removeprefix('eval/')}": value
                    for key, value in numbers.items()
                }
            # Reporters read the step from the state, and these numbers are of an earlier one.
            state_then = copy.copy(state)
            state_then.global_step = sample.step
            state.log_history.append({**numbers, "step": sample.step})
            if self._handler is not None:
                terminal, reporters = _split(self._handler)
                # Logging resets the control's requests, and the Trainer has not acted on them yet.
                reporters.on_log(args, state_then, copy.copy(control), numbers)
                printed = {key: numbers[key] for key in _PRINTED if key in numbers}
                # Those of untrained passes have other names.
                if printed:
                    terminal.on_log(args, state_then, copy.copy(control), printed)


# The numbers of a sample that the Trainer prints. Its trackers get all of them: hundreds if a model has many layers.
_PRINTED = ("attn/max_logit", "attn/entropy")


def _split(handler: CallbackHandler) -> tuple[CallbackHandler, CallbackHandler]:
    """Returns one handler for the Trainer's own printing callbacks, and one for all other callbacks."""
    handlers = []
    for prints in (True, False):
        handler_of_kind = copy.copy(handler)
        callbacks = handler.callbacks
        handler_of_kind.callbacks = [
            c
            for c in callbacks
            if isinstance(c, PrinterCallback | ProgressCallback) is prints
        ]
        handlers.append(handler_of_kind)
    return handlers[0], handlers[1]


def _loss_of_micro_batch() -> Tensor | None:
    """Returns what the Trainer has just computed, which it hands to no callback. Its sum hides losses that are NaN."""
    for frame in running_frames():
        loss = frame.f_locals.get("tr_loss_step")
        if isinstance(loss, Tensor):
            return loss
    return None


def _calling_handler(callback: TrainerCallback) -> CallbackHandler | None:
    """Returns the handler that is calling this callback; the Trainer does not give callbacks any other access to each
    other."""
    for frame in running_frames():
        owner = frame.f_locals.get("self")
        if isinstance(owner, CallbackHandler) and any(
            member is callback for member in owner.callbacks
        ):
            return owner
    return None
