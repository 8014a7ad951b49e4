"""Simulated engines take the configured durations, and calibration reproduces a step."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import StoreError
from relax_actors.cli.prediction import Mode, Prediction, best_split, mode_config
from relax_actors.config import Config, load_config
from relax_actors.config.simulate import Distribution
from relax_actors.engines.protocols import GenerationRequest, TrainSample, train
from relax_actors.errors import ConfigError
from relax_actors.simulation.backends import SimulatedTraining
from relax_actors.simulation.devices import Devices
from relax_actors.simulation.durations import (
    calibrated,
    concurrent_seconds,
    draw,
    generation_seconds,
    mean,
    random_generator,
    training_seconds,
)
from relax_actors.simulation.inference import SimulatedInference
from tests.support.batches import silent
from tests.support.simulated import Clock, simulated_devices

EXAMPLES = Path(__file__).parents[2] / "examples" / "simulate"
DENSE = EXAMPLES / "qwen3_4b_16_h800.toml"


def test_plain_number_is_a_constant() -> None:
    assert draw(Distribution.model_validate(2.5), random_generator(1), 3).tolist() == [2.5, 2.5, 2.5]


@pytest.mark.parametrize("given", [{}, {"constant": 1, "median": 2}, {"values": []}, {"sigma": 1}, -1])
def test_distribution_needs_exactly_one_kind(given: Any) -> None:
    with pytest.raises(ValueError, match=r"one of|greater than"):
        Distribution.model_validate(given)


def test_log_normal_has_the_given_median_spread_and_limit() -> None:
    drawn = draw(Distribution(median=100, sigma=0.5, most=300), random_generator(3), 20000)
    assert np.median(drawn) == pytest.approx(100, rel=0.02)
    inner = np.log(drawn[drawn < 300] / 100)
    assert np.quantile(inner, 0.1) == pytest.approx(-0.5 * 1.29, abs=0.05)
    assert drawn.max() == 300
    assert np.mean(drawn == 300) == pytest.approx(0.014, abs=0.004)


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=20), st.integers(0, 2**32))
def test_draws_from_values_stay_between_minimum_and_maximum(values: list[float], seed: int) -> None:
    drawn = draw(Distribution(values=values), random_generator(seed), 50)
    assert min(values) <= drawn.min()
    assert drawn.max() <= max(values)


def test_quantiles_of_draws_reproduce_the_distribution() -> None:
    original = draw(Distribution(median=3, sigma=0.8), random_generator(1), 20000)
    redrawn = draw(
        Distribution(values=np.quantile(original, np.linspace(0, 1, 101)).tolist()), random_generator(2), 20000
    )
    for q in (0.05, 0.5, 0.95):
        assert np.quantile(redrawn, q) == pytest.approx(np.quantile(original, q), rel=0.05)


def test_speed_of_samples_depends_on_the_samples_that_still_run() -> None:
    # 10 tokens at the speed of two samples on one device, then 10 at the speed of one.
    assert concurrent_seconds(np.array([20.0, 10.0]), 1, 0.5) == 10 * 2.0 + 10 * 1.5
    assert concurrent_seconds(np.array([20.0, 10.0]), 2, 0.5) == 10 * 1.5 + 10 * 1.25
    assert concurrent_seconds(np.array([20.0, 10.0]), 1, 0.0) == 20.0


@given(st.lists(st.floats(0, 100), min_size=1, max_size=8), st.integers(1, 8), st.floats(0, 1))
def test_more_devices_are_never_slower(tokens: list[float], devices: int, load: float) -> None:
    drawn = np.array(tokens)
    assert concurrent_seconds(drawn, devices + 1, load) <= concurrent_seconds(drawn, devices, load) + 1e-9


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_calibrated_durations_reproduce_the_colocated_step(path: Path) -> None:
    config = calibrated(load_config(path))
    simulate = config.simulate
    assert simulate is not None
    assert simulate.calibration is not None
    samples = config.trainer.prompts_per_step * config.rollout.group_size
    colocated = simulate.model_copy(update={"placement": "colocated"})
    step_seconds = generation_seconds(simulate.generation, samples, simulate.devices) + training_seconds(colocated, 0)
    step_seconds += mean(simulate.phases.switch) + mean(simulate.phases.load) + mean(simulate.phases.publish)
    assert step_seconds == pytest.approx(simulate.calibration.colocated_seconds)


def test_calibration_keeps_values_that_are_set() -> None:
    config = calibrated(load_config(DENSE, ["simulate.generation.token_seconds=0.01"]))
    assert config.simulate is not None
    assert config.simulate.generation.token_seconds == 0.01
    assert config.simulate.training.device_seconds is not None


def test_generation_share_without_time_for_training_is_an_error() -> None:
    with pytest.raises(ConfigError, match="lower generation_share"):
        calibrated(load_config(DENSE, ["simulate.calibration.generation_share=0.99"]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["simulate.rollout_devices=16"], "leaves none of 16 devices to train"),
        (["rollout.backend=transformers"], "simulated engines come together"),
        (["simulate.phases.swich=1"], "did you mean 'switch'"),
    ],
)
def test_invalid_settings_are_named(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(DENSE, settings)


def test_all_admissible_rows_are_generated_at_once() -> None:
    config = calibrated(load_config(DENSE))
    derived = mode_config(config, Mode("separate", 2, 6), Path("somewhere"))
    assert derived.simulate is not None
    assert derived.rollout.replicas * derived.rollout.max_concurrent_prompts == 3 * config.trainer.prompts_per_step
    assert (derived.simulate.devices_of("rollout"), derived.simulate.devices_of("trainer")) == (6, 10)
    assert derived.staleness.max == 2
    colocated = mode_config(config, Mode("colocated", 0, 6), Path("somewhere"))
    assert colocated.simulate is not None
    assert (colocated.simulate.devices_of("rollout"), colocated.simulate.devices_of("trainer")) == (16, 16)


@given(st.integers(2, 40), st.floats(0.05, 0.95), st.integers(1, 4))
def test_best_split_is_within_one_per_cent_of_the_optimum(devices: int, share: float, move: int) -> None:
    if devices <= move:
        return

    def predicted(n: int) -> Prediction:
        generation, training = share / n, (1 - share) / (devices - n)
        step = max(generation, training)
        idle = (step - training) / step
        return Prediction("m", n, devices - n, step, 1 / step, 0.0, idle, 0.0, 2.0, 0.0, 0, 0.0)

    numbers = range(move, devices, move)
    found = best_split(predicted, devices, move)
    assert found in numbers
    # A trainer that waits for less than half a per cent of a step counts as not waiting.
    assert predicted(found).step_seconds <= 1.01 * min(predicted(n).step_seconds for n in numbers)


def request(seed: int) -> GenerationRequest:
    return GenerationRequest(np.array([0, 2], np.int32), seed, 8, 1.0, 1.0, 2, frozenset())


def weights(folder: Path, config: Config, devices: Devices) -> tuple[Path, str]:
    training = SimulatedTraining(config, devices)
    training.initialise(1)
    return folder / "w.safetensors", training.publish(folder / "w.safetensors")


def test_unverified_weights_generate_nothing(tmp_path: Path) -> None:
    config, devices = simulated_devices(tmp_path)
    engine = SimulatedInference(devices, 0, 64)
    path, fingerprint = weights(tmp_path, config, devices)
    with pytest.raises(StoreError, match="no verified weights"):
        engine.generate([request(1)], silent)
    with pytest.raises(StoreError, match="not loaded"):
        engine.load(0, "other", [path])
    engine.load(0, fingerprint, [path])
    assert engine.version == 0


def test_finished_rows_leave_and_others_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_actors.simulation.inference.time", Clock())
    config, devices = simulated_devices(tmp_path)
    engine = SimulatedInference(devices, 0, 64, rows=3)
    path, fingerprint = weights(tmp_path, config, devices)
    engine.load(0, fingerprint, [path])
    longest = {
        seed: float(draw(devices.simulate.generation.tokens, random_generator(seed), 8).max()) for seed in range(40)
    }
    slow, *quick = sorted(longest, key=lambda seed: -longest[seed])
    late, room = [request(quick[-1])], []

    def more(most: int) -> list[GenerationRequest]:
        room.append(most)
        return [late.pop()] if late and most > 1 else []

    order = [i for done in engine.stream([request(slow), request(quick[-2])], silent, None, more) for i, _ in done]
    # The shorter row leaves first and makes room for the late one.
    assert order == [1, 2, 0]
    assert set(room) <= {1, 2, 3}
    assert devices.running.sum() == 0


def test_generation_takes_its_duration_and_is_reproducible(tmp_path: Path) -> None:
    config, devices = simulated_devices(tmp_path)
    engine = SimulatedInference(devices, 3, 64)
    path, fingerprint = weights(tmp_path, config, devices)
    engine.load(7, fingerprint, [path])
    began = time.monotonic()
    (first,), (again,) = engine.generate([request(5)], silent), engine.generate([request(5)], silent)
    took = time.monotonic() - began
    section = devices.simulate.generation
    lengths = draw(section.tokens, random_generator(5), 8)
    alone = (section.token_seconds or 0) * concurrent_seconds(lengths, 8, section.load)
    assert took >= 2 * alone * 0.001 * 0.99
    assert [s.tokens.tolist() for s in first] == [s.tokens.tolist() for s in again]
    assert {int(s.versions[0]) for s in first} == {7}
    assert devices.running.sum() == 0


def test_weights_depend_only_on_the_batches(tmp_path: Path) -> None:
    config, devices = simulated_devices(tmp_path, time_scale=1e-6)

    def batch(seed: int) -> list[TrainSample]:
        tokens = np.array([seed], np.int32)
        return [TrainSample.of_completion(tokens, tokens, advantages=np.array([1.0], np.float32))]

    def after(*seeds: int) -> SimulatedTraining:
        engine = SimulatedTraining(config, devices)
        engine.initialise(1)
        for step, seed in enumerate(seeds):
            train(engine, batch(seed), step, silent)
        return engine

    assert after(1, 2).fingerprint() == after(1, 2).fingerprint()
    assert after(1, 2).fingerprint() != after(1, 3).fingerprint()
    (tmp_path / "c").mkdir()
    after(1, 2).save(tmp_path / "c")
    resumed = SimulatedTraining(config, devices)
    resumed.load(tmp_path / "c")
    train(resumed, batch(3), 2, silent)
    assert resumed.fingerprint() == after(1, 2, 3).fingerprint()


def test_colocated_trainer_waits_for_generation_and_blocks_new_rows(tmp_path: Path) -> None:
    _, ours = simulated_devices(tmp_path, placement="colocated")
    _, theirs = simulated_devices(tmp_path, placement="colocated")
    _, late = simulated_devices(tmp_path, placement="colocated")
    order: list[str] = []
    generating, asked, training, done = (threading.Event() for _ in range(4))

    def take_turn() -> None:
        with theirs.training(asked.set):
            order.append("training")
            training.set()
            assert done.wait(10)
            order.append("trained")

    def generate() -> None:
        with late.generating(generating.set):
            order.append("generating again")

    trainer, rollout = threading.Thread(target=take_turn), threading.Thread(target=generate)
    with ours.generating(silent):
        trainer.start()
        assert asked.wait(10)
        rollout.start()
        assert generating.wait(10)
        order.append("generated")
    assert training.wait(10)
    done.set()
    trainer.join(10)
    rollout.join(10)
    assert order == ["generated", "training", "trained", "generating again"]
