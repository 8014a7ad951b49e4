"""Simulated engines: their times are those of the distributions, and what is fitted gives the measured figure again."""

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
from relax_actors.simulation.devices import Devices
from relax_actors.simulation.inference import SimulatedInference
from relax_actors.simulation.times import (
    calibrated,
    draw,
    generation_seconds,
    generator_of,
    mean,
    seconds_together,
    training_seconds,
)
from relax_actors.simulation.training import SimulatedTraining

EXAMPLES = Path(__file__).parents[2] / "examples" / "simulate"
DENSE = EXAMPLES / "qwen3_4b_16_h800.toml"


def silent() -> None:
    """Progress that nobody waits for."""


def test_a_bare_number_is_a_constant() -> None:
    assert draw(Distribution.model_validate(2.5), generator_of(1), 3).tolist() == [2.5, 2.5, 2.5]


@pytest.mark.parametrize("given", [{}, {"constant": 1, "median": 2}, {"values": []}, {"sigma": 1}, -1])
def test_a_distribution_is_one_thing(given: Any) -> None:
    with pytest.raises(ValueError, match=r"one of|greater than"):
        Distribution.model_validate(given)


def test_a_log_normal_has_its_median_its_spread_and_its_cut() -> None:
    drawn = draw(Distribution(median=100, sigma=0.5, most=300), generator_of(3), 20000)
    assert np.median(drawn) == pytest.approx(100, rel=0.02)
    inner = np.log(drawn[drawn < 300] / 100)
    assert np.quantile(inner, 0.1) == pytest.approx(-0.5 * 1.29, abs=0.05)
    assert drawn.max() == 300
    assert np.mean(drawn == 300) == pytest.approx(0.014, abs=0.004)


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=20), st.integers(0, 2**32))
def test_values_are_drawn_between_the_least_and_the_greatest(values: list[float], seed: int) -> None:
    drawn = draw(Distribution(values=values), generator_of(seed), 50)
    assert min(values) <= drawn.min()
    assert drawn.max() <= max(values)


def test_quantiles_of_draws_give_the_distribution_again() -> None:
    whole = draw(Distribution(median=3, sigma=0.8), generator_of(1), 20000)
    again = draw(Distribution(values=np.quantile(whole, np.linspace(0, 1, 101)).tolist()), generator_of(2), 20000)
    for q in (0.05, 0.5, 0.95):
        assert np.quantile(again, q) == pytest.approx(np.quantile(whole, q), rel=0.05)


def test_samples_together_are_as_slow_as_those_that_still_run() -> None:
    # 10 tokens at the pace of two on one device, then 10 more at that of one.
    assert seconds_together(np.array([20.0, 10.0]), 1, 0.5) == 10 * 2.0 + 10 * 1.5
    assert seconds_together(np.array([20.0, 10.0]), 2, 0.5) == 10 * 1.5 + 10 * 1.25
    assert seconds_together(np.array([20.0, 10.0]), 1, 0.0) == 20.0


@given(st.lists(st.floats(0, 100), min_size=1, max_size=8), st.integers(1, 8), st.floats(0, 1))
def test_more_devices_are_never_slower(tokens: list[float], devices: int, load: float) -> None:
    drawn = np.array(tokens)
    assert seconds_together(drawn, devices + 1, load) <= seconds_together(drawn, devices, load) + 1e-9


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_what_is_fitted_gives_the_colocated_figure_again(path: Path) -> None:
    config = calibrated(load_config(path))
    simulate = config.simulate
    assert simulate is not None
    assert simulate.calibration is not None
    samples = config.trainer.prompts_per_step * config.rollout.group_size
    colocated = simulate.model_copy(update={"placement": "colocated"})
    whole = generation_seconds(simulate.generation, samples, simulate.devices) + training_seconds(colocated, 0)
    whole += mean(simulate.phases.switch) + mean(simulate.phases.load) + mean(simulate.phases.publish)
    assert whole == pytest.approx(simulate.calibration.colocated_seconds)


def test_what_is_said_is_not_fitted() -> None:
    config = calibrated(load_config(DENSE, ["simulate.generation.token_seconds=0.01"]))
    assert config.simulate is not None
    assert config.simulate.generation.token_seconds == 0.01
    assert config.simulate.training.device_seconds is not None


def test_a_share_that_leaves_nothing_for_training_is_an_error() -> None:
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
def test_mistakes_are_named(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(DENSE, settings)


def test_every_row_that_may_be_admitted_is_generated_at_once() -> None:
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
def test_the_best_split_is_found_where_neither_waits(devices: int, share: float, move: int) -> None:
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


def devices_of(folder: Path, **simulate: Any) -> tuple[Config, Devices]:
    config = calibrated(load_config(DENSE))
    assert config.simulate is not None
    section = config.simulate.model_copy(update={"time_scale": 0.001, **simulate})
    return config.model_copy(update={"simulate": section}), Devices(section, folder)


def request(seed: int) -> GenerationRequest:
    return GenerationRequest(np.array([0, 2], np.int32), seed, 8, 1.0, 1.0, 2, frozenset())


def weights(folder: Path, config: Config, devices: Devices) -> tuple[Path, str]:
    training = SimulatedTraining(config, devices)
    training.initialise(1)
    return folder / "w.safetensors", training.publish(folder / "w.safetensors")


def test_nothing_is_generated_with_weights_that_are_not_verified(tmp_path: Path) -> None:
    config, devices = devices_of(tmp_path)
    engine = SimulatedInference(devices, 0, 64)
    path, fingerprint = weights(tmp_path, config, devices)
    with pytest.raises(StoreError, match="no verified weights"):
        engine.generate([request(1)], silent)
    with pytest.raises(StoreError, match="not loaded"):
        engine.load(0, "other", [path])
    engine.load(0, fingerprint, [path])
    assert engine.version == 0


class Clock:
    """Time that passes by sleeping alone."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_rows_end_by_themselves_and_others_come_in_their_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_actors.simulation.inference.time", Clock())
    config, devices = devices_of(tmp_path)
    engine = SimulatedInference(devices, 0, 64, rows=3)
    path, fingerprint = weights(tmp_path, config, devices)
    engine.load(0, fingerprint, [path])
    longest = {seed: float(draw(devices.simulate.generation.tokens, generator_of(seed), 8).max()) for seed in range(40)}
    slow, *quick = sorted(longest, key=lambda seed: -longest[seed])
    late, room = [request(quick[-1])], []

    def more(most: int) -> list[GenerationRequest]:
        room.append(most)
        return [late.pop()] if late and most > 1 else []

    order = [i for done in engine.stream([request(slow), request(quick[-2])], silent, None, more) for i, _ in done]
    # The row that was quicker leaves first, and makes room for the one that came late.
    assert order == [1, 2, 0]
    assert set(room) <= {1, 2, 3}
    assert devices.running.sum() == 0


def test_generation_takes_its_time_and_says_the_same_again(tmp_path: Path) -> None:
    config, devices = devices_of(tmp_path)
    engine = SimulatedInference(devices, 3, 64)
    path, fingerprint = weights(tmp_path, config, devices)
    engine.load(7, fingerprint, [path])
    began = time.monotonic()
    (first,), (again,) = engine.generate([request(5)], silent), engine.generate([request(5)], silent)
    took = time.monotonic() - began
    section = devices.simulate.generation
    lengths = draw(section.tokens, generator_of(5), 8)
    alone = (section.token_seconds or 0) * seconds_together(lengths, 8, section.load)
    assert took >= 2 * alone * 0.001 * 0.99
    assert [s.tokens.tolist() for s in first] == [s.tokens.tolist() for s in again]
    assert {int(s.versions[0]) for s in first} == {7}
    assert devices.running.sum() == 0


def test_the_weights_are_a_function_of_the_batches(tmp_path: Path) -> None:
    config, devices = devices_of(tmp_path, time_scale=1e-6)

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


def test_colocated_the_trainer_waits_for_generation_and_keeps_new_rows_out(tmp_path: Path) -> None:
    _, ours = devices_of(tmp_path, placement="colocated")
    _, theirs = devices_of(tmp_path, placement="colocated")
    _, late = devices_of(tmp_path, placement="colocated")
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
