"""Training with Megatron-Core: one rank in this process, or a group of rank processes.

Only the package `mcore` imports megatron-core. `installation`, `layout` and `group` import neither it nor torch.
"""
