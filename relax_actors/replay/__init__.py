"""Time travel: steps computed again, branches and differences of runs, origin.

Nothing here writes to a run that it reads.
"""
