"""HTTP routes by which an operator changes a live run: operations, rollouts and external engines."""
