"""Learning algorithms as pure functions: advantages, losses, corrections, schedules.

No function depends on actors or files. Import the module that you need: only `losses` and `corrections` import torch,
so a role that computes advantages does not.
"""
