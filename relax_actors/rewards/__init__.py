"""Reward functions: from a completion and its prompt to a number; higher is better.

    def my_reward(completion: str, prompt: Prompt) -> float
    def my_reward(completion: str, prompt: Prompt, sample: Sample) -> float  # reads the conversation of an episode
    async def my_reward(completions: list[str], prompt: Prompt, *, url: str) -> list[float | Score]  # all of a row

No reward needs torch. Packages of extras are imported on first use.
"""

from __future__ import annotations

from relax_actors.rewards._boxes import iou
from relax_actors.rewards._choice import multiple_choice
from relax_actors.rewards._error_rate import character_error_rate, word_error_rate
from relax_actors.rewards._form import format_match, json_schema, length_limits, repetition
from relax_actors.rewards._intervals import temporal_iou
from relax_actors.rewards._math_verify import math_verify
from relax_actors.rewards._numeric import numeric_match
from relax_actors.rewards._overlap import normalised_match, token_f1
from relax_actors.rewards._reasoning_gym import reasoning_gym_score
from relax_actors.rewards._text import exact_match, positional_match
from relax_actors.rewards.credit import environment
from relax_actors.rewards.loading import RewardFunction, load_reward, requires
from relax_actors.rewards.score import Score, checked

__all__ = [
    "RewardFunction",
    "Score",
    "character_error_rate",
    "checked",
    "environment",
    "exact_match",
    "format_match",
    "iou",
    "json_schema",
    "length_limits",
    "load_reward",
    "math_verify",
    "multiple_choice",
    "normalised_match",
    "numeric_match",
    "positional_match",
    "reasoning_gym_score",
    "repetition",
    "requires",
    "temporal_iou",
    "token_f1",
    "word_error_rate",
]
