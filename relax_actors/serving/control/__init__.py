"""HTTP routes of operators: operations, rollouts and external engines of a live run."""
