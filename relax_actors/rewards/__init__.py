"""Reward functions: from a completion and its prompt to a number; higher is better.

    def my_reward(completion: str, prompt: Prompt) -> float
    def my_reward(completion: str, prompt: Prompt, sample: Sample) -> float  # reads the conversation of an episode

No reward needs torch. The packages behind `math_verify` and `reasoning_gym_score` are imported on first use.
"""

from __future__ import annotations

from relax_actors.rewards._boxes import iou
from relax_actors.rewards._choice import multiple_choice
from relax_actors.rewards._error_rate import character_error_rate, word_error_rate
from relax_actors.rewards._intervals import temporal_iou
from relax_actors.rewards._math_verify import math_verify
from relax_actors.rewards._numeric import numeric_match
from relax_actors.rewards._reasoning_gym import reasoning_gym_score
from relax_actors.rewards._text import exact_match, positional_match
from relax_actors.rewards.credit import environment
from relax_actors.rewards.loading import RewardFunction, checked, load_reward, load_rewards, requires

__all__ = [
    "RewardFunction",
    "character_error_rate",
    "checked",
    "environment",
    "exact_match",
    "iou",
    "load_reward",
    "load_rewards",
    "math_verify",
    "multiple_choice",
    "numeric_match",
    "positional_match",
    "reasoning_gym_score",
    "requires",
    "temporal_iou",
    "word_error_rate",
]
