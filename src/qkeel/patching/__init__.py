"""The private parts of torch that qkeel uses, one module per group of mechanisms.

Everywhere else torch is used as documented.

| purpose | module |
|---|---|
| modes over torch functions and operators; private operators; module tables; state of compiler and processes | modes |
| one module's forward; every forward pass of a model; functions whose code is replaced | forward |
| nodes of autograd's graph; checkpointed parts of a pass | autograd |
| optimizer steps; new optimizers; Adam's groups | optimizers |
| what nested values, objects among them, hold | held_objects |
"""
