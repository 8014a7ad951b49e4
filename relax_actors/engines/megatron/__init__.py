"""Training with Megatron-Core: one rank in this process, or a group of rank processes.

Only the package `mcore` imports megatron-core. `installation` and `layout` import neither it nor torch.
"""
