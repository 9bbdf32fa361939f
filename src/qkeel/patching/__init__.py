"""The private parts of torch that qkeel uses, one module per group of mechanisms.

Everywhere else torch is used as documented.

| module | what it has |
|---|---|
| forward | hooks around a model's outermost call, and passes that qkeel makes beside the program's own |
| module_forward | one module's forward, replaced by an attribute of the instance |
| function_code | functions whose code is exchanged, so that every alias of them is seen |
| modes | modes over torch functions and operators |
| module_tables | nn.Module's tables of parameters, submodules, buffers and hooks; the tree of modules |
| autograd | nodes of autograd's graph; the checkpointed parts of a pass |
| roles, losses | whether a pass was trained; whether what it returned is the loss |
| optimizers | optimizer steps; new optimizers |
| sharded_models | stages of pipelines, weights that fully_shard has split, collectives, Join |
| torch_state | private operators; whether torch is compiling, transforming, tracing or recomputing |
| guards | guards around what qkeel calls while a model runs; hooks of one thread |
| held_objects | the objects that values hold in containers, dataclasses and attributes |
"""
