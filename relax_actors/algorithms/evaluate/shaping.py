"""Evaluator of reward shaping: functions that lower rewards of long samples."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

import numpy as np
import torch

from relax_actors.algorithms.evaluate.accepted import check_name, check_settings, number, whole_number
from relax_actors.algorithms.evaluate.inputs import Evaluation, Inputs
from relax_actors.algorithms.shaping import length_penalty, overlong_penalty

PENALTIES: dict[str, Callable[..., Any]] = {"overlong": overlong_penalty, "length": length_penalty}


def penalty(name: str, settings: Mapping[str, Any], inputs: Inputs) -> Evaluation:
    """Evaluate what is added to the rewards of samples; all samples are one group.

    Positional parameters of the function are inputs, one number for each sample; the others are settings.

    Raises:
        TypeError: a setting is no number, or no whole number where tokens are counted.
        ValueError: a setting that has no default is missing.
    """
    check_name(name, PENALTIES)
    parameters = inspect.signature(PENALTIES[name]).parameters.values()
    own = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    check_settings(f"shaping {name!r}", settings, [p.name for p in own])
    if missing := [p.name for p in own if p.default is p.empty and p.name not in settings]:
        msg = f"shaping {name!r} needs the setting {missing[0]}"
        raise ValueError(msg)
    types = get_type_hints(PENALTIES[name])
    for setting in settings:
        (whole_number if types[setting] is int else number)(settings, setting)
    arrays = {p.name: inputs.sample(p.name).numpy() for p in parameters if p.kind is not p.KEYWORD_ONLY}
    return Evaluation({"penalty": torch.from_numpy(np.asarray(PENALTIES[name](**arrays, **settings)))})
