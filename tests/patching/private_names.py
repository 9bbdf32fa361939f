"""The table of every private name of torch that qkeel uses; tests/patching compares it with the source and with torch.

`make test` on a new version of torch says in one sentence which of these names is gone and what that costs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrivateName:
    """A private name of torch. A new one is a new row of `PRIVATE_NAMES` and a use in a module of qkeel.patching.

    Args:
        name: as the code writes it; "new or old" where versions of torch differ.
        home: dotted path of the module or class in which torch defines it; "a graph node" where autograd's nodes do.
        purpose: what qkeel does with it.
        without: what no longer works on a torch that lacks it.
        used_by: the module of qkeel.patching that uses it.
    """

    name: str
    home: str
    purpose: str
    without: str
    used_by: str


def _rows(used_by: str, *rows: tuple[str, str, str]) -> Iterator[PrivateName]:
    """The names of rows of "home: names", purpose and without, all used by one module."""
    for place, purpose, without in rows:
        home, _, names = place.partition(": ")
        for name in names.split(", "):
            yield PrivateName(
                name=name, home=home, purpose=purpose, without=without, used_by=used_by
            )


PRIVATE_NAMES: tuple[PrivateName, ...] = (
    *_rows(
        "modes",
        (
            "torch: _C, _dynamo",
            "to reach other names of this table",
            "everything in qkeel.patching",
        ),
        (
            "torch._C: _functorch",
            "to know that a torch.func transform is under way, and whether it is vmap",
            "qkeel's compiled kernels, which such transforms cannot go through, and sites inside vmap",
        ),
        (
            "torch._C: _len_torch_function_stack",
            "to know that a mode was entered since a module's call began, which may change its attention's call",
            "statistics of known attention under a remedy that came later: they would be those of the call before it",
        ),
        (
            "torch._C: _set_grad_enabled",
            "to record no graph in what every step calls, at a tenth of the calls of torch.no_grad()",
            "without_gradients, for which torch.no_grad() can stand",
        ),
        (
            "torch.autograd.forward_ad: _current_level",
            "to know that forward-mode differentiation is under way",
            "forward-mode differentiation: fused operators would drop its tangents",
        ),
        (
            "torch._C: _current_graph_task_id",
            "to know that gradient checkpointing computes a forward pass again, inside the backward pass",
            "statistics of checkpointed models, which would count each call twice",
        ),
        (
            "torch._dynamo.OptimizedModule: _orig_mod",
            "to find the user's own module inside what torch.compile returned",
            "watching and changing compiled models",
        ),
        (
            "torch.nn.Module: _compiled_call_impl",
            "to know that module.compile() was called",
            "watching compiled models without recompiling them",
        ),
        (
            "torch.compiler.assume_constant_result: _dynamo_marked_constant",
            "to have torch's compiler take a function's answer for a constant without importing the compiler for that",
            "compiling attention with fullgraph=True",
        ),
        (
            "torch.overrides: _get_current_function_mode_stack",
            "to know that a mode sees or replaces torch's calls",
            "tables of RoPE in every layer of such a mode: they would be kept from one to the next",
        ),
        (
            "torch.utils: _device",
            "to tell torch.set_default_device from other modes",
            "the keeping of tables where a default device is set",
        ),
    ),
    *_rows(
        "modes",
        (
            "torch.overrides: _get_current_function_mode, _pop_mode, _push_mode, _pop_torch_function_stack, "
            "_push_on_torch_function_stack",
            "to turn a mode off while a watched function runs, and to end one that is not the innermost",
            "sites of flex_attention and flash-attn, and watching after an interrupt",
        ),
        (
            "torch.utils: _python_dispatch",
            "to see operators (TorchDispatchMode), as torch's own documentation does",
            "sites inside torch.jit.script and torch.func.vmap",
        ),
        (
            "torch.utils._python_dispatch: _get_current_dispatch_mode, _pop_mode_temporarily",
            "to turn such a mode off while a watched function runs",
            "sites of flex_attention and flash-attn next to torch.jit.script",
        ),
        (
            "torch.utils._python_dispatch: _get_current_dispatch_mode_stack, _len_torch_dispatch_stack",
            "to keep the modes of a selective checkpoint from storing what qkeel computes",
            "watching and remedies inside selective checkpoints",
        ),
        (
            "torch._C: _autograd",
            "to reach the hooks for saved tensors",
            "watching a model inside a checkpoint",
        ),
        (
            "torch._C._autograd: _pop_saved_tensors_default_hooks, _push_saved_tensors_default_hooks, "
            "_top_saved_tensors_default_hooks",
            "to keep a checkpoint from counting the tensors that an extra pass saves",
            "watching a model, and remedies without an example, where the whole model runs inside a checkpoint",
        ),
        (
            "torch._C: _PreserveDispatchKeyGuard, _dispatch_tls_set_dispatch_key_excluded",
            "to let autograd record what is computed from an operator's arguments",
            "the rows per head of sites inside torch.jit.script and torch.func.vmap",
        ),
        (
            "torch: _ops",
            "to distinguish an overload of an operator from a function",
            "sites inside torch.jit.script and torch.func.vmap",
        ),
    ),
    *_rows(
        "modes",
        (
            "torch.nn.Module: _parameters, _modules, _buffers",
            "to put parameters, submodules and buffers in, and back, in the order that they had",
            "remedies that add or replace modules, undo to the bit, and finding sites without a trace",
        ),
        (
            "torch.nn.Module: _forward_pre_hooks, _forward_hooks, _forward_hooks_with_kwargs, "
            "_forward_hooks_always_called, _forward_pre_hooks_with_kwargs",
            "to hook many modules for one pass, to find hooks of qkeel, and to remove those that a model registered in "
            "a probe's pass",
            "two watchers of one model, and finding sites without a trace",
        ),
    ),
    *_rows(
        "optimizers",
        (
            "torch.optim.Optimizer: _optimizer_step_post_hooks",
            "to know an optimizer of torch's from a wrapper that runs no hooks",
            "remedies on steps under accelerate",
        ),
    ),
    *_rows(
        "autograd",
        (
            "torch._C: _autograd",
            "to reach the two names below",
            "sigma_reparam under gradient checkpointing",
        ),
        (
            "torch._C._autograd: _top_saved_tensors_default_hooks",
            "to know in which non-reentrant checkpoint a forward pass runs",
            "sigma_reparam under gradient checkpointing, if several forward passes precede a backward pass",
        ),
        (
            "torch._C._autograd: _get_current_graph_task_keep_graph",
            "to know whether the same forward pass may be recomputed again",
            "sigma_reparam under gradient checkpointing",
        ),
        (
            "torch.utils.checkpoint: _checkpoint_without_reentrant_generator",
            "to run checkpointed parts once, with a graph, in a probe's pass, and to forget each when it has been read",
            "finding the sites of models that use gradient checkpointing",
        ),
    ),
    *_rows(
        "autograd",
        (
            "a graph node of torch.nn.functional.layer_norm: _saved_normalized_shape, _saved_weight",
            "to read the size and the gain of a norm that q or k came through",
            "bounds on logits by the gains of norms in models that are not qkeel's",
        ),
        (
            "a graph node of a convolution: _saved_transposed",
            "to know whether the rows of its weight make its output or its input",
            "heads of models that project by convolutions",
        ),
        (
            "a graph node of a slice: _saved_start, _saved_end, _saved_step",
            "to read which part of a longer vector the bias of q or k is",
            "biases of nn.MultiheadAttention with keys of another size",
        ),
        (
            "a graph node: _input_metadata",
            "to know the shape of what an einsum computed, which no tensor shows any more",
            "heads of models that project by torch.einsum",
        ),
        (
            "a graph node of addmm: _saved_mat1",
            "to know that a projection of a module's input makes what is added to scores",
            "remedies on weights of heads whose logits have such a term are accepted",
        ),
        (
            "a graph node of a product: _saved_self, _saved_other",
            "to check on numbers that a product is a norm, and by what factor it scales",
            "bounds on logits by the gains of norms in models that are not qkeel's",
        ),
        (
            "torch.Tensor: _base",
            "to know a view of a parameter from an activation",
            "sites of hand-written attention next to products with views of weights",
        ),
        (
            "torch.Tensor: _version",
            "to know that a tensor was not written to since",
            "watching logit changes, and the fused step of lalr, at their price",
        ),
    ),
    *_rows(
        "modes",
        (
            "torch.ops.aten: _scaled_dot_product_flash_attention_for_cpu, "
            "_scaled_dot_product_flash_attention_for_cpu_backward",
            "to merge rows of far and near keys by their logsumexps",
            "windowed attention on a CPU",
        ),
        (
            "torch: _foreach_mul_, _foreach_copy_, _foreach_lerp_",
            "to step many tensors by one call",
            "remedies on steps, and the lab's Muon, at their price",
        ),
    ),
    *_rows(
        "modes",
        (
            "torch.distributed.distributed_c10d: _get_default_store",
            "to ask other processes without waiting for a silent one for ever",
            "watching and remedies in distributed training",
        ),
        (
            "a Joinable: _join_config",
            "to know that processes may end at different steps",
            "watching under torch's Join, where one process would wait for another that has ended",
        ),
        (
            "torch.distributed.pipelining.stage.PipelineStage: _compute_outputs or _shape_inference",
            "to leave out the pass by which a pipeline finds out shapes",
            "statistics of the first step of a pipeline, which would count memory that holds no data",
        ),
        (
            "torch.distributed.fsdp.FSDPModule: _get_fsdp_state",
            "to reach how a sharded module was set up",
            "finding sites on a model that fully_shard has split",
        ),
        (
            "the state of a sharded module: _auto_reshard_after_forward, _fsdp_param_groups or _fsdp_param_group, "
            "_lazy_init, _state_ctx",
            "to keep weights whole over the passes of a search, and to leave it as it was where such a pass fails",
            "finding sites on a model that fully_shard has split",
        ),
        (
            "torch.distributed.distributed_c10d: _resolve_process_group",
            "to know which processes an operator waits for",
            "finding sites on a model with split heads",
        ),
    ),
)
