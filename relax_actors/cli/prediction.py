"""Predictions of runs on a simulated cluster.

Every mode is a run of its own with the real actors, broker and table; only the engines are simulated. Times are in
simulated seconds. The trainer is idle until the last row of its step has arrived. Then it reads the rows: that is
time of this machine, not of a simulated engine, so it is not divided by `time_scale`.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.table import Table

from relax_actors.checks import require
from relax_actors.cli.borrowed_times import check_settings, with_times_of
from relax_actors.cli.foreground import explain, log_to_file, run_root
from relax_actors.config import Config, load_config, validate
from relax_actors.errors import ConfigError, RelaxError
from relax_actors.monitoring.connection import connected
from relax_actors.monitoring.recorded import read_metrics, with_recorded
from relax_actors.monitoring.screen import Screen
from relax_actors.monitoring.watcher import Watcher
from relax_actors.runtime import logs
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.simulation.devices import Devices
from relax_actors.simulation.durations import calibrated
from relax_actors.supervision.root import Root

SAMPLE_SECONDS = 0.02
STARVING = 0.005
"""Share of a step: a trainer that waits longer for rows has too few rollout devices."""
NO_SECTION = (
    "relax simulate needs a section [simulate]; examples/simulate has examples, whose times a run on GPUs can take: "
    "--times examples/simulate/qwen3_4b_16_h800.toml"
)


@dataclass(frozen=True, slots=True)
class Mode:
    """Placement, lead (`staleness.max`) and number of rollout devices of one simulated run."""

    placement: Literal["colocated", "separate"]
    staleness: int
    rollout_devices: int

    @property
    def name(self) -> str:
        """Name in the table of results."""
        return "colocated" if self.placement == "colocated" else f"separate, max {self.staleness}"


@dataclass(frozen=True, slots=True)
class Prediction:
    """Result of one mode over its measured steps; times in simulated seconds."""

    mode: str
    rollout_devices: int
    trainer_devices: int
    step_seconds: float
    steps_per_hour: float
    trainer_idle_seconds: float
    trainer_idle_share: float
    generation_idle_share: float
    lead: float
    staleness_mean: float
    staleness_max: int
    overhead_seconds: float
    """Time of this machine between the last row of a step and its start; part of `step_seconds`, not scaled."""
    ratio: float | None = None
    """Steps an hour divided by those of `colocated`."""


class _Sampler(threading.Thread):
    """Thread that samples the share of busy rollout devices."""

    def __init__(self, config: Config) -> None:
        super().__init__(name="sampler", daemon=True)
        if config.simulate is None:
            raise ConfigError(NO_SECTION)
        self._devices = Devices(config.simulate, config.folder)
        self._number = config.simulate.devices_of("rollout")
        self._halt = threading.Event()
        self.samples: list[tuple[float, float]] = []

    def run(self) -> None:
        """Sample until `idle` is called."""
        while not self._halt.wait(SAMPLE_SECONDS):
            share = min(1.0, int(self._devices.running.sum()) / self._number)
            self.samples.append((time.time(), share))

    def idle(self, begin: float, end: float) -> float:
        """Stop; return the mean share of idle devices between two times (seconds since 1970)."""
        self._halt.set()
        shares = [share for at, share in self.samples if begin <= at <= end]
        return 1.0 - float(np.mean(shares)) if shares else 0.0


def mode_config(config: Config, mode: Mode, folder: Path) -> Config:
    """Return the configuration of a mode's run.

    There are enough rollouts to generate all rows that may be admitted, and further steps before and after the
    measured ones, in which the run fills and drains.

    Raises:
        ConfigError: there is no section [simulate].
    """
    if config.simulate is None:
        raise ConfigError(NO_SECTION)
    rows = config.trainer.prompts_per_step * (mode.staleness + 1)
    body: dict[str, Any] = config.model_dump(mode="json")
    body["run"] |= {"folder": str(folder), "steps": config.simulate.steps + 2 * mode.staleness + 2}
    body["rollout"]["replicas"] = -(-rows // config.rollout.max_concurrent_prompts)
    body["staleness"]["max"] = mode.staleness
    body["simulate"] |= {"placement": mode.placement, "rollout_devices": mode.rollout_devices}
    return validate(body, f"relax simulate, {mode.name}")


def predict(config: Config, mode: Mode, import_path: str, console: Screen) -> Prediction:
    """Run a mode and measure it; raises RelaxError if it fails."""
    scratch = Path(tempfile.mkdtemp(prefix="relax-simulate-"))
    derived = mode_config(config, mode, scratch)
    require(derived)
    root = Root(derived, import_path)
    log_to_file(root.folder)
    watcher = Watcher(root, console, live=False, lines=False)
    sampler = _Sampler(derived)
    sampler.start()
    again = "run `relax simulate` again"
    failure, _ = run_root(root, watcher, console, again)
    if failure is not None:
        explain(console, failure, root.folder, f"fix the cause; then {again}")
    if failure is not None or watcher.result is None:
        msg = f"the run of {mode.name} ended before its last step; see the logs in {scratch}/logs"
        raise RelaxError(msg)
    prediction = measure(root.folder, mode, sampler.idle)
    shutil.rmtree(scratch)
    return prediction


def measure(folder: RunFolder, mode: Mode, idle: Callable[[float, float], float]) -> Prediction:
    """Measure a run's steps from its log; `idle` is that of rollout devices."""
    with connected(str(folder.root)) as at:
        bodies = {int(body["step"]): body for body in read_metrics(at.table, "trainer", "step")}
        leads = [(body["time"], body["lead"]) for body in read_metrics(at.table, "prompts") if "lead" in body]
        simulate = at.config.simulate
    if simulate is None:
        raise ConfigError(NO_SECTION)
    first, count = mode.staleness + 2, simulate.steps
    steps = [bodies[step] for step in range(first, first + count)]
    begin, end, scale = bodies[first - 1]["time"], steps[-1]["time"], simulate.time_scale

    def mean(name: str) -> float:
        return float(np.mean([step.get(name, 0.0) for step in steps]))

    starved = mean("starved_seconds")
    overhead = mean("waited_seconds") - starved
    seconds = ((end - begin) / count - overhead) / scale + overhead
    # Reported once a second: the last report before the first step applies to it too.
    measured = [lead for at, lead in leads if begin - 1 <= at <= end] or [0]
    return Prediction(
        mode=mode.name,
        rollout_devices=simulate.devices_of("rollout"),
        trainer_devices=simulate.devices_of("trainer"),
        step_seconds=round(seconds, 2),
        steps_per_hour=round(3600 / seconds, 2),
        trainer_idle_seconds=round(starved / scale, 3),
        trainer_idle_share=round(starved / scale / seconds, 5),
        generation_idle_share=round(idle(begin, end), 4),
        lead=round(float(np.mean(measured)), 2),
        staleness_mean=round(mean("staleness_mean"), 3),
        staleness_max=max(int(step["staleness"]) for step in steps),
        overhead_seconds=round(overhead, 4),
    )


def best_split(predicted: Callable[[int], Prediction], devices: int, move: int) -> int:
    """Find the rollout devices with the shortest step, by steps of `move`.

    With few rollout devices the trainer starves; with many it has too few devices itself. Bisection finds the smallest
    number with which the trainer does not starve; the better of it and the number below is returned.
    """
    numbers = list(range(move, devices, move))
    low, high = 0, len(numbers) - 1
    while low < high:
        middle = (low + high) // 2
        if predicted(numbers[middle]).trainer_idle_share > STARVING:
            low = middle + 1
        else:
            high = middle
    return min(numbers[max(0, low - 1) : low + 1], key=lambda n: predicted(n).step_seconds)


def predict_all(path: Path, settings: list[str], times: Path | None = None, *, split: bool, as_json: bool) -> int:
    """Predict a configuration's modes, print them, and return the exit code.

    Args:
        path: the configuration.
        settings: overrides of it; those of [simulate] are of `times`, if that is given.
        times: file whose [simulate] is used; None for that of the configuration.
        split: also search the best split of devices, for the last value of `simulate.staleness`.
        as_json: print the results as one line of JSON at the end.

    Raises:
        ConfigError: the configuration cannot work.
        RelaxError: a run was interrupted or could not be kept up.
    """
    logs.configure()
    console = Screen(stderr=as_json, width=None if sys.stdout.isatty() else 120)
    of_cluster = [setting for setting in settings if times is not None and setting.startswith("simulate.")]
    config = load_config(path, [setting for setting in settings if setting not in of_cluster])
    if times is not None:
        check_settings(of_cluster)
        config = with_times_of(calibrated(with_recorded(load_config(times, of_cluster))), config)
    config = calibrated(with_recorded(config))
    if config.simulate is None:
        raise ConfigError(NO_SECTION)
    section, import_path = config.simulate, str((times or path).resolve().parent)
    colocated = Mode("colocated", 0, section.rollout_devices)
    separate = [Mode("separate", staleness, section.rollout_devices) for staleness in section.staleness]
    predictions: dict[Mode, Prediction] = {}

    def predicted(mode: Mode) -> Prediction:
        if mode not in predictions:
            console.print(
                f"{mode.name}: {mode.rollout_devices} of {section.devices} devices are for rollout", style="dim"
            )
            predictions[mode] = predict(config, mode, import_path, console)
        return predictions[mode]

    base = predicted(colocated).step_seconds
    for mode in separate:
        predicted(mode)
    best: int | None = None
    if split and separate:
        last = separate[-1]
        best = best_split(lambda n: predicted(Mode("separate", last.staleness, n)), section.devices, section.move)
    results = [
        Prediction(**{**asdict(p), "ratio": round(base / p.step_seconds, 3)})
        for _, p in sorted(
            predictions.items(), key=lambda item: (item[0].placement, item[0].staleness, item[1].rollout_devices)
        )
    ]
    _show(console, config, results, best)
    if as_json:
        sys.stdout.write(json.dumps(_body(config, results, best)) + "\n")
    return 0


def _body(config: Config, results: list[Prediction], best: int | None) -> dict[str, Any]:
    simulate = config.simulate
    fitted = {}
    if simulate is not None and simulate.calibration is not None:
        fitted = {
            "token_seconds": simulate.generation.token_seconds,
            "device_seconds": simulate.training.device_seconds,
        }
    return {
        "run": config.run.name,
        "time_scale": simulate.time_scale if simulate else None,
        "fitted": fitted,
        "modes": [asdict(result) for result in results],
        "best_rollout_devices": best,
    }


def _show(console: Screen, config: Config, results: list[Prediction], best: int | None) -> None:
    title = f"{config.run.name}: simulated seconds"
    table = Table(title=title, caption=None if best is None else f"best split: {best} devices for rollout")
    for column in (
        "mode",
        "rollout/trainer",
        "step s",
        "steps/h",
        "ratio",
        "trainer idle",
        "rollout idle",
        "lead",
        "staleness mean/max",
        "overhead ms",
    ):
        table.add_column(column, justify="left" if column == "mode" else "right")
    for r in results:
        table.add_row(
            r.mode,
            f"{r.rollout_devices}/{r.trainer_devices}",
            f"{r.step_seconds:.1f}",
            f"{r.steps_per_hour:.1f}",
            f"{r.ratio:.2f}",
            f"{r.trainer_idle_share:.2%}",
            f"{r.generation_idle_share:.1%}",
            f"{r.lead:.1f}",
            f"{r.staleness_mean:.2f}/{r.staleness_max}",
            f"{1000 * r.overhead_seconds:.0f}",
        )
    console.print(table)
