"""The section [record]: which rows a run's folder keeps for people to look at."""

from __future__ import annotations

from relax_actors.config.sections import Fraction, NonNegativeInt, Section


class RecordSection(Section):
    """[record]: rows that the run's folder keeps after the table has deleted them, for people to look at.

    A row is kept if any of the rules keeps it, with its tokens, log-probs, versions, mask, advantages and rewards. A
    process of its own reads the table as an observer and writes the folder `record`. Nothing of the run depends on it.
    """

    max_mib: NonNegativeInt = 64
    """Size limit in MiB; 0 keeps no rows. The oldest rows go first, those kept by `failed` and `evaluation` last."""
    every: NonNegativeInt = 10
    """Keep all rows of every k-th step; 1 keeps all rows, 0 none."""
    share: Fraction = 0.0
    """Keep this share of the rows of each step, drawn by `run.seed`."""
    highest: NonNegativeInt = 1
    """Keep this many rows of each step with the highest mean reward."""
    lowest: NonNegativeInt = 1
    """Keep this many rows of each step with the lowest mean reward."""
    failed: bool = True
    """Keep rows that were quarantined, or dropped because of a fault."""
    evaluation: NonNegativeInt = 8
    """Keep this many held-out rows of each evaluated version, spread evenly; the texts of all answers are in the folder
    `evaluations`."""
    entropy: bool = False
    """Record the entropy of the policy at each sampled token, in nats, over the whole vocabulary at the sampling
    temperature, beside its log-prob: 4 bytes a token of a trajectory. It changes no other bit of the run. A
    row that was begun before it was set has none. Needs `rollout.backend = "transformers"`."""
