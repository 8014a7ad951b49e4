"""Evaluations: what a version answered to held-out prompts, the figures of the answers, and comparisons of runs."""
