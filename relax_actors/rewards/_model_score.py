"""Reward `reward_model`: what the role of the same name says of a sample."""

from __future__ import annotations

from relax_actors.messages import Prompt
from relax_actors.rewards.score import Score


def reward_model(completion: str, prompt: Prompt, model_score: Score) -> Score:  # noqa: ARG001 scored elsewhere
    """Return the score of the reward model that `[roles.reward_model]` serves."""
    return model_score
