"""Operators of torch without a public function: attention kernels that return their logsumexp, steps of many tensors.
Each is torch's own, under the name that says what it does."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

Operator = torch._ops.OpOverloadPacket

# Attention kernels: (output, row logsumexps, ...) where F.scaled_dot_product_attention returns the output alone.
flash_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_on_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
flash = torch.ops.aten._scaled_dot_product_flash_attention
memory_efficient = torch.ops.aten._scaled_dot_product_efficient_attention
cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
registered = torch.ops.aten._scaled_dot_product_fused_attention_overrideable

# Which kernel F.scaled_dot_product_attention would take, as a number of torch.nn.attention.SDPBackend.
kernel_choice = torch._fused_sdp_choice

# What runs behind F.scaled_dot_product_attention, by the names without underscores around them.
SDPA_KERNELS = {
    "scaled_dot_product_flash_attention": flash,
    "scaled_dot_product_flash_attention_for_cpu": flash_on_cpu,
    "scaled_dot_product_efficient_attention": memory_efficient,
    "scaled_dot_product_cudnn_attention": cudnn,
    "scaled_dot_product_fused_attention_overrideable": registered,
}

# One operator over a list of tensors, in place but for `lerp_all`.
add_to_all = torch._foreach_add_
multiply_all = torch._foreach_mul_
copy_to_all = torch._foreach_copy_
lerp_all = torch._foreach_lerp
lerp_all_in_place = torch._foreach_lerp_


def operator_name(function: object) -> str:
    """The name of an operator with its namespace, as "aten::add"; "" of anything else."""
    return function._qualified_op_name if isinstance(function, Operator) else ""


def argument_names(operator: Operator) -> list[str]:
    """The names of an operator's arguments, in their order."""
    return [argument.name for argument in operator.default._schema.arguments]


def written_arguments(operator: object, args: tuple[object, ...], kwargs: Mapping[str, object]) -> list[object]:
    """The arguments that an operator writes into, as add_ does; none of anything that is no operator."""
    written = _written(operator) if isinstance(operator, torch._ops.OpOverload) else ()
    return [args[i] if i < len(args) else kwargs[name] for i, name in written if i < len(args) or name in kwargs]


@functools.cache
def _written(operator: torch._ops.OpOverload) -> list[tuple[int, str]]:
    """The places and names of the arguments that an operator writes into."""
    arguments = enumerate(operator._schema.arguments)
    return [(i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]
