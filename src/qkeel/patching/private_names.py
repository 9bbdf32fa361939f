"""The table of every private name of torch that qkeel uses; tests/patching compares it with the source and with torch.

`make test` on a new version of torch says in one sentence which of these names is gone and what that costs.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrivateName:
    """A private name of torch. A new one is a new row of `PRIVATE_NAMES` and a use in a module of qkeel.patching.

    Args:
        name: as the code writes it.
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


def _rows(home: str, used_by: str, names: tuple[str, ...], purpose: str, without: str) -> tuple[PrivateName, ...]:
    return tuple(PrivateName(name=name, home=home, purpose=purpose, without=without, used_by=used_by) for name in names)


PRIVATE_NAMES: tuple[PrivateName, ...] = (
    *_rows(
        "torch",
        "compiler_state",
        ("_C", "_dynamo"),
        "to reach other names of this table",
        "everything in qkeel.patching",
    ),
    *_rows(
        "torch._C",
        "compiler_state",
        ("_functorch",),
        "to know that a torch.func transform is under way, and whether it is vmap",
        "qkeel's compiled kernels, which such transforms cannot go through, and sites inside vmap",
    ),
    *_rows(
        "torch.autograd.forward_ad",
        "compiler_state",
        ("_current_level",),
        "to know that forward-mode differentiation is under way",
        "forward-mode differentiation: fused operators would drop its tangents",
    ),
    *_rows(
        "torch._C",
        "compiler_state",
        ("_current_graph_task_id",),
        "to know that gradient checkpointing computes a forward pass again, inside the backward pass",
        "statistics of checkpointed models, which would count each call twice",
    ),
    *_rows(
        "torch._dynamo.OptimizedModule",
        "compiler_state",
        ("_orig_mod",),
        "to find the user's own module inside what torch.compile returned",
        "watching and changing compiled models",
    ),
    *_rows(
        "torch.nn.Module",
        "compiler_state",
        ("_compiled_call_impl",),
        "to know that module.compile() was called",
        "watching compiled models without recompiling them",
    ),
    *_rows(
        "torch.compiler.assume_constant_result",
        "compiler_state",
        ("_dynamo_marked_constant",),
        "to have torch's compiler take a function's answer for a constant without importing the compiler for that",
        "compiling attention with fullgraph=True",
    ),
    *_rows(
        "torch.overrides",
        "modes",
        ("_get_current_function_mode", "_pop_mode", "_push_mode"),
        "to turn a mode off while a watched function runs, and to end one that is not the innermost",
        "sites of flex_attention and flash-attn, and watching after an interrupt",
    ),
    *_rows(
        "torch.utils",
        "modes",
        ("_python_dispatch",),
        "to see operators (TorchDispatchMode), as torch's own documentation does",
        "sites inside torch.jit.script and torch.func.vmap",
    ),
    *_rows(
        "torch.overrides",
        "compiler_state",
        ("_get_current_function_mode_stack",),
        "to know that a mode sees or replaces torch's calls",
        "tables of RoPE in every layer of such a mode: they would be kept from one to the next",
    ),
    *_rows(
        "torch.utils",
        "compiler_state",
        ("_device",),
        "to tell torch.set_default_device from other modes",
        "the keeping of tables where a default device is set",
    ),
    *_rows(
        "torch.utils._python_dispatch",
        "modes",
        ("_get_current_dispatch_mode", "_pop_mode_temporarily"),
        "to turn such a mode off while a watched function runs",
        "sites of flex_attention and flash-attn next to torch.jit.script",
    ),
    *_rows(
        "torch._C",
        "modes",
        ("_PreserveDispatchKeyGuard", "_dispatch_tls_set_dispatch_key_excluded"),
        "to let autograd record what is computed from an operator's arguments",
        "the rows per head of sites inside torch.jit.script and torch.func.vmap",
    ),
    *_rows(
        "torch",
        "modes",
        ("_ops",),
        "to distinguish an overload of an operator from a function",
        "sites inside torch.jit.script and torch.func.vmap",
    ),
    *_rows(
        "torch.nn.Module",
        "module_tables",
        ("_parameters", "_modules", "_buffers"),
        "to put parameters, submodules and buffers in, and back, in the order that they had",
        "remedies that add or replace modules, undo to the bit, and finding sites without a trace",
    ),
    *_rows(
        "torch.nn.Module",
        "module_tables",
        ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
        "to find hooks of qkeel, and to remove those that a model registered in a probe's pass",
        "two watchers of one model, and finding sites without a trace",
    ),
    *_rows(
        "torch.optim.Optimizer",
        "optimizer_hooks",
        ("_optimizer_step_post_hooks",),
        "to know an optimizer of torch's from a wrapper that runs no hooks",
        "remedies on steps under accelerate",
    ),
    *_rows(
        "torch.utils.checkpoint",
        "checkpointing",
        ("_checkpoint_without_reentrant_generator",),
        "to run checkpointed parts once, with a graph, in a probe's pass, and to forget each when it has been read",
        "finding the sites of models that use gradient checkpointing",
    ),
    *_rows(
        "a graph node of torch.nn.functional.layer_norm",
        "graph_nodes",
        ("_saved_normalized_shape", "_saved_weight"),
        "to read the size and the gain of a norm that q or k came through",
        "bounds on logits by the gains of norms in models that are not qkeel's",
    ),
    *_rows(
        "a graph node of a convolution",
        "graph_nodes",
        ("_saved_transposed",),
        "to know whether the rows of its weight make its output or its input",
        "heads of models that project by convolutions",
    ),
    *_rows(
        "a graph node of a slice",
        "graph_nodes",
        ("_saved_start", "_saved_end", "_saved_step"),
        "to read which part of a longer vector the bias of q or k is",
        "biases of nn.MultiheadAttention with keys of another size",
    ),
    *_rows(
        "a graph node",
        "graph_nodes",
        ("_input_metadata",),
        "to know the shape of what an einsum computed, which no tensor shows any more",
        "heads of models that project by torch.einsum",
    ),
    *_rows(
        "a graph node of a product",
        "graph_nodes",
        ("_saved_self", "_saved_other"),
        "to check on numbers that a product is a norm, and by what factor it scales",
        "bounds on logits by the gains of norms in models that are not qkeel's",
    ),
    *_rows(
        "torch.Tensor",
        "graph_nodes",
        ("_base",),
        "to know a view of a parameter from an activation",
        "sites of hand-written attention next to products with views of weights",
    ),
    *_rows(
        "torch.Tensor",
        "graph_nodes",
        ("_version",),
        "to know that a tensor was not written to since",
        "watching logit changes, and the fused step of lalr, at their price",
    ),
    *_rows(
        "torch.ops.aten",
        "private_operators",
        (
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention_for_cpu_backward",
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_fused_attention_overrideable",
        ),
        "to get row logsumexps from torch's attention kernels, and to know these kernels when they are called",
        "statistics at the price of a bracket, and windowed attention on a CPU",
    ),
    *_rows(
        "torch",
        "private_operators",
        ("_fused_sdp_choice",),
        "to know which kernel F.scaled_dot_product_attention would take",
        "statistics at the price of a bracket",
    ),
    *_rows(
        "torch.ops.aten.add",
        "private_operators",
        ("_qualified_op_name",),
        "to know qkeel's compiled attention when it is called",
        "the bound on the largest logit of compiled attention",
    ),
    *_rows(
        "torch.ops.aten.add.default",
        "private_operators",
        ("_schema",),
        "to name the arguments of an operator",
        "sites inside torch.jit.script and torch.func.vmap",
    ),
    *_rows(
        "torch",
        "private_operators",
        ("_foreach_add_", "_foreach_mul_", "_foreach_copy_", "_foreach_lerp", "_foreach_lerp_"),
        "to step many tensors by one call",
        "remedies on steps, and the lab's Muon, at their price",
    ),
    *_rows(
        "torch.distributed.distributed_c10d",
        "parallel_training",
        ("_get_default_store",),
        "to ask other processes without waiting for a silent one for ever",
        "watching and remedies in distributed training",
    ),
    *_rows(
        "a Joinable",
        "parallel_training",
        ("_join_config",),
        "to know that processes may end at different steps",
        "watching under torch's Join, where one process would wait for another that has ended",
    ),
    *_rows(
        "torch.distributed.pipelining.stage.PipelineStage",
        "parallel_training",
        ("_compute_outputs",),
        "to leave out the pass by which a pipeline finds out shapes",
        "statistics of the first step of a pipeline, which would count memory that holds no data",
    ),
    *_rows(
        "torch.distributed.fsdp.FSDPModule",
        "parallel_training",
        ("_get_fsdp_state",),
        "to reach how a sharded module was set up",
        "finding sites on a model that fully_shard has split",
    ),
    *_rows(
        "the state of a sharded module",
        "parallel_training",
        ("_auto_reshard_after_forward", "_fsdp_param_groups", "_lazy_init", "_state_ctx"),
        "to keep weights whole over the passes of a search, and to leave it as it was where such a pass fails",
        "finding sites on a model that fully_shard has split",
    ),
    *_rows(
        "torch.distributed.distributed_c10d",
        "parallel_training",
        ("_resolve_process_group",),
        "to know which processes an operator waits for",
        "finding sites on a model with split heads",
    ),
    *_rows(
        "torch.optim.Adam",
        "adam_groups",
        ("_init_group",),
        "to learn and to change which weights the step of Adam and AdamW works on",
        "steps by head inside fused Adam (lalr is then computed around the step) and one AdamW for stacked runs",
    ),
    *_rows(
        "torch.optim.Optimizer",
        "adam_groups",
        ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
        "to call an optimizer's hooks where the step of many runs is one operator",
        "one AdamW for stacked runs",
    ),
    *_rows(
        "torch.optim.optimizer",
        "adam_groups",
        ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"),
        "to leave optimizers to torch while hooks of all optimizers are registered",
        "one AdamW for stacked runs",
    ),
)
