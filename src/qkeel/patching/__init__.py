"""Every way in which qkeel reaches into torch from outside, one module per mechanism.

Elsewhere torch is used as its documentation says. Here are torch's modes, hooks, tables and operators that it keeps
private. `tests/patching/private_names.py` lists each of them, why it is used, and what stops working where a version of
torch lacks it.

| what is changed or observed | module |
|---|---|
| torch functions and operators, while a mode is entered | modes |
| attention functions that are no torch functions (FlexAttention, flash-attn), by their code | exchanged_code |
| one module's forward, on the instance | instance_forward |
| every forward pass of a model, eager or compiled | forward_passes |
| hooks, attributes and classes of modules | module_tables |
| optimizer steps, and optimizers that are made | optimizer_hooks |
| what Adam is about to step | adam_groups |
| nodes of autograd's graph | graph_nodes |
| whether torch compiles, exports, transforms or recomputes now | compiler_state, checkpointing |
"""
