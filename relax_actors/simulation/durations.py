"""Durations of simulated phases: seeded draws, and calibration to a measured step."""

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
"""Draws of a step's samples that a mean is taken over."""


def random_generator(seed: int) -> np.random.Generator:
    """Return a generator whose numbers depend on `seed` alone."""
    return np.random.Generator(np.random.Philox(key=seed))


def draw(distribution: Distribution, generator: np.random.Generator, count: int = 1) -> Floats:
    """Draw `[count] float64` from a distribution; raises ConfigError."""
    if distribution.constant is not None:
        return np.full(count, distribution.constant)
    if distribution.values is not None:
        # Values are quantiles; the distribution is uniform between neighbours.
        positions = generator.random(count) * (len(distribution.values) - 1)
        return np.interp(positions, np.arange(len(distribution.values)), sorted(distribution.values))
    if distribution.median is not None:
        drawn = distribution.median * np.exp(distribution.sigma * generator.standard_normal(count))
        return drawn if distribution.most is None else np.minimum(drawn, distribution.most)
    msg = f"the recorded run {distribution.recorded} was not read; use `relax simulate`, which reads it"
    raise ConfigError(msg)


def concurrent_seconds(tokens: Floats, devices: int, load: float) -> float:
    """Return the time of samples that start together, in tokens of a sample that runs alone.

    Args:
        tokens: `[samples] float64`, length of each sample.
        devices: on which the samples are spread evenly.
        load: share by which each running sample slows its device down.
    """
    ends = np.sort(tokens)
    running = np.arange(len(ends), 0, -1)
    return float(np.sum(np.diff(ends, prepend=0.0) * (1 + load * running / devices)))


@lru_cache(maxsize=64)
def _mean_concurrent_seconds(distribution: str, count: int, devices: int, load: float) -> float:
    tokens = Distribution.model_validate_json(distribution)
    generator = random_generator(0)
    drawn = (draw(tokens, generator, count) for _ in range(TRIALS))
    return math.fsum(concurrent_seconds(one, devices, load) for one in drawn) / TRIALS


def generation_seconds(section: GenerationSection, samples: int, devices: int) -> float:
    """Return the mean time, over `TRIALS` draws, to generate all samples of a step at once.

    Raises:
        ConfigError: `token_seconds` is neither set nor calibrated.
    """
    if section.token_seconds is None:
        msg = "simulate.generation.token_seconds is not set; set it, or add [simulate.calibration]"
        raise ConfigError(msg)
    units = _mean_concurrent_seconds(section.tokens.model_dump_json(), samples, devices, section.load)
    return section.token_seconds * units


def calibrated(config: Config) -> Config:
    """Return the configuration with the values that [simulate.calibration] determines.

    `colocated_seconds` = generation + switch + publish + load + training, all on all devices. The share of generation
    gives `token_seconds`; the time that remains for training gives `device_seconds`. Values that are set are kept.

    Raises:
        ConfigError: no time remains for training.
    """
    simulate = config.simulate
    if simulate is None or simulate.calibration is None:
        return config
    measured, share = simulate.calibration.colocated_seconds, simulate.calibration.generation_share
    generation, training = simulate.generation, simulate.training
    if generation.token_seconds is None and generation.row is None:
        unit = with_values(generation, token_seconds=1.0)
        units = generation_seconds(unit, config.trainer.prompts_per_step * config.rollout.group_size, simulate.devices)
        generation = with_values(generation, token_seconds=measured * share / units)
    if training.device_seconds is None and training.step is None:
        phases = simulate.phases
        other_phases = sum(mean(phase) for phase in (phases.switch, phases.publish, phases.load)) + training.fixed
        remaining = measured * (1 - share) - other_phases
        if remaining <= 0:
            msg = f"simulate.calibration: {measured:g} s per step leave no time for training; lower generation_share"
            raise ConfigError(msg)
        training = with_values(training, device_seconds=remaining * simulate.devices)
    return with_values(config, simulate=with_values(simulate, generation=generation, training=training))


def mean(distribution: Distribution) -> float:
    """Return the mean of a distribution, estimated from draws."""
    if distribution.constant is not None:
        return distribution.constant
    return float(draw(distribution, random_generator(0), 4096).mean())


def training_seconds(simulate: SimulateSection, seed: int) -> float:
    """Return the seconds of a step on the trainer's devices; raises ConfigError."""
    training = simulate.training
    if training.step is not None:
        return float(draw(training.step, random_generator(seed))[0])
    if training.device_seconds is None:
        msg = "simulate.training.device_seconds is not set; set it, or add [simulate.calibration]"
        raise ConfigError(msg)
    return training.device_seconds / simulate.devices_of("trainer") + training.fixed


def with_values(section: S, **values: object) -> S:
    """Return a copy of a section with the given fields replaced."""
    return section.model_copy(update=values)
