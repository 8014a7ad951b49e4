"""Time travel: steps computed again from the log, branches and differences of runs, origin of a model.

Nothing here writes to a run that it reads.
"""
