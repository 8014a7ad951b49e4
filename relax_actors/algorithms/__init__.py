"""Pure functions of the learning algorithms: advantages, losses, corrections, schedules, micro-batches.

No function knows of actors or files. Only `losses` and `corrections` import torch, so that a role that computes
advantages does not; import the module you need.
"""
