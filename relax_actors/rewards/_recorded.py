"""Reward that a trace recorded."""

from __future__ import annotations

from collections.abc import Sequence

from relax_actors.errors import RowError
from relax_actors.messages import Prompt, Sample
from relax_actors.rewards.score import Score
from relax_actors.traces.rows import REWARD


def recorded(completion: str, prompt: Prompt, sample: Sample | None = None, *, components: Sequence[str] = ()) -> Score:
    """Return the reward that the traces of [data] recorded for a sample, as float32.

    Args:
        completion: not read.
        prompt: not read.
        sample: the sample.
        components: recorded components to return with it; `reward.components` names the same ones.

    Raises:
        RowError: the trace has no reward, or lacks a component.
    """
    del completion, prompt
    metrics = {} if sample is None else sample.metrics
    if REWARD not in metrics:
        msg = (
            'reward "recorded" needs traces with rewards, and this sample has none; record them, or set '
            "reward.function to a function that computes them"
        )
        raise RowError(msg)
    if lacking := next((name for name in components if f"{REWARD}/{name}" not in metrics), None):
        msg = f"the trace of a sample has no component {lacking!r} of its reward; correct reward.options.recorded"
        raise RowError(msg)
    return Score(metrics[REWARD], {name: metrics[f"{REWARD}/{name}"] for name in components})
