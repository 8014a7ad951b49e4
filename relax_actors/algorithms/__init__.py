"""Pure functions of the learning algorithms: advantages, losses, corrections, schedules, micro-batches.

Nothing here knows of actors, files or configuration. Only `losses` and `corrections` import torch, so a role that
computes advantages stays light; import the module you need.
"""
