"""Evaluations: answers to held-out prompts, their figures, and comparisons."""
