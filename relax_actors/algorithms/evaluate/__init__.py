"""Evaluate algorithm functions on numbers of a file, to compare two engines.

`python -m relax_actors.algorithms.evaluate FILE.json` reads a list of cases and prints outputs and gradients as JSON.
The format is in docs/evaluate.md.
"""
