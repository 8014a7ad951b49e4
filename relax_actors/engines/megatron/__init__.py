"""Training with Megatron-Core: one rank in this process, or a group of ranks behind one engine.

`mcore` is all that imports megatron-core. `presence`, `layout` and `group` cost neither it nor torch.
"""
