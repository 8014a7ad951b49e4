"""How long the phases of a step take: distributions, pure and seeded, and their calibration on one measured figure."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from relax_actors.config import Config
from relax_actors.config.sections import Section
from relax_actors.config.simulate import Distribution, GenerationSection, SimulateSection
from relax_actors.errors import ConfigError

Floats = NDArray[np.float64]
S = TypeVar("S", bound=Section)
TRIALS = 200


def generator_of(seed: int) -> np.random.Generator:
    """Random numbers from a seed alone."""
    return np.random.Generator(np.random.Philox(key=seed))


def draw(distribution: Distribution, source: np.random.Generator, count: int = 1) -> Floats:
    """`[count] float64` from a distribution.

    Raises:
        ConfigError: it is to be taken from a recorded run, and nobody has.
    """
    if distribution.constant is not None:
        return np.full(count, distribution.constant)
    if distribution.values is not None:
        # Values are quantiles: between two of them all is equally likely.
        places = source.random(count) * (len(distribution.values) - 1)
        return np.interp(places, np.arange(len(distribution.values)), sorted(distribution.values))
    if distribution.median is not None:
        found = distribution.median * np.exp(distribution.sigma * source.standard_normal(count))
        return found if distribution.most is None else np.minimum(found, distribution.most)
    msg = f"the figures of {distribution.recorded} were not read; `relax simulate` does"
    raise ConfigError(msg)


def seconds_together(tokens: Floats, devices: int, load: float) -> float:
    """Time that samples take which all begin at once, in units of one token of one sample alone.

    Samples lie evenly on the devices; each that still runs slows its device's others down by `load`.
    """
    ends = np.sort(tokens)
    running = np.arange(len(ends), 0, -1)
    return float(np.sum(np.diff(ends, prepend=0.0) * (1 + load * running / devices)))


@lru_cache(maxsize=64)
def _mean_together(distribution: str, count: int, devices: int, load: float) -> float:
    tokens = Distribution.model_validate_json(distribution)
    source = generator_of(0)
    return math.fsum(seconds_together(draw(tokens, source, count), devices, load) for _ in range(TRIALS)) / TRIALS


def generation_seconds(section: GenerationSection, samples: int, devices: int) -> float:
    """Mean time in which all samples of a step are generated at once, over `TRIALS` draws.

    Raises:
        ConfigError: `token_seconds` is not known.
    """
    if section.token_seconds is None:
        msg = "simulate.generation.token_seconds is not set, and no [simulate.calibration] to fit it"
        raise ConfigError(msg)
    units = _mean_together(section.tokens.model_dump_json(), samples, devices, section.load)
    return section.token_seconds * units


def calibrated(config: Config) -> Config:
    """The configuration with what [simulate.calibration] fits filled in.

    Colocated seconds = generation + switch + training, all on all devices. The share of generation gives
    `token_seconds`; what is left beside the switch, publication and loading is training, and gives `device_seconds`.

    Raises:
        ConfigError: nothing is left for training.
    """
    simulate = config.simulate
    if simulate is None or simulate.calibration is None:
        return config
    measured, share = simulate.calibration.colocated_seconds, simulate.calibration.generation_share
    generation, training = simulate.generation, simulate.training
    if generation.token_seconds is None and generation.row is None:
        one = updated(generation, token_seconds=1.0)
        units = generation_seconds(one, config.trainer.prompts_per_step * config.rollout.group_size, simulate.devices)
        generation = updated(generation, token_seconds=measured * share / units)
    if training.device_seconds is None and training.step is None:
        phases = simulate.phases
        others = sum(mean(phase) for phase in (phases.switch, phases.publish, phases.load)) + training.fixed
        left = measured * (1 - share) - others
        if left <= 0:
            msg = f"simulate.calibration: {measured:g} s a step leave nothing for training; lower generation_share"
            raise ConfigError(msg)
        training = updated(training, device_seconds=left * simulate.devices)
    return updated(config, simulate=updated(simulate, generation=generation, training=training))


def mean(distribution: Distribution) -> float:
    """Mean of a distribution, over draws."""
    if distribution.constant is not None:
        return distribution.constant
    return float(draw(distribution, generator_of(0), 4096).mean())


def training_seconds(simulate: SimulateSection, seed: int) -> float:
    """Time of a step on the trainer's devices.

    Raises:
        ConfigError: it is not known.
    """
    training = simulate.training
    if training.step is not None:
        return float(draw(training.step, generator_of(seed))[0])
    if training.device_seconds is None:
        msg = "simulate.training.device_seconds is not set, and no [simulate.calibration] to fit it"
        raise ConfigError(msg)
    return training.device_seconds / simulate.devices_of("trainer") + training.fixed


def updated(section: S, **values: object) -> S:
    """A section with other values."""
    return section.model_copy(update=values)
