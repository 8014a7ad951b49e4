"""Checks of whole runs: `relax up` on the device, undisturbed and under kills, with the same bits at the end."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from live_run import is_alive, name_of, wait_for
from process_memory import tree

from gpu_checks.frame import Failed, Figures, Place, check, require
from relax_actors.weights import files as weights

DEMO = Path(__file__).parents[2] / "examples" / "demo" / "demo.toml"
SECONDS = 200.0
CHECKPOINT_EVERY = 4
SHARED = ("placement.colocate=[['rollout','trainer']]",)
"""Both compute on one GPU, one at a time."""


def settings(place: Place, steps: int) -> tuple[str, ...]:
    """Return settings of an on-policy run whose last weights depend on nothing but its seed."""
    common = (
        "run.deterministic=true",
        "staleness.max=0",
        f"run.steps={steps}",
        "eval.rows=4",
        f"trainer.checkpoint_every={CHECKPOINT_EVERY}",
        "supervision.intensity=1000",
        "supervision.backoff_max=0.3",
        "supervision.ack_wait=2",
    )
    return (*common, *SHARED, "trainer.device=cuda", "rollout.device=cuda") if place.on_gpu else common


def start(place: Place, name: str, more: tuple[str, ...]) -> subprocess.Popen[bytes]:
    """Start `relax up` of the demo."""
    command = [sys.executable, "-m", "relax_actors.cli.main", "up", str(DEMO), f"run.name={name}"]
    log = (place.folder / f"{name}.log").open("wb")
    return subprocess.Popen(
        [*command, f"run.folder={place.folder / name}", "--json", "--quiet", *more], stdout=log, stderr=log
    )


def finish(run: subprocess.Popen[bytes], place: Place, name: str, seconds: float = SECONDS) -> dict[str, Any]:
    """Wait for the end of a run, and return its result and, as `weights`, the fingerprint of its last weights.

    Raises:
        Failed: it did not end well.
    """
    try:
        code: int | None = run.wait(seconds)
    except subprocess.TimeoutExpired:
        run.send_signal(signal.SIGTERM)
        run.wait(60)
        code = None
    said = (place.folder / f"{name}.log").read_text(errors="replace")
    if code:
        msg = f"{name}: relax up ended with exit code {code}:\n{said[-2000:]}\n{_logs(place.folder / name)}"
        raise Failed(msg)
    if code is None:
        msg = f"{name}: relax up was not over within {seconds:g} s:\n{said[-1000:]}\n{_logs(place.folder / name)}"
        raise Failed(msg)
    result: dict[str, Any] = json.loads(said.strip().splitlines()[-1])
    return result | {"weights": last_weights(place.folder / name)}


def last_weights(run: Path) -> str:
    """Return the fingerprint of the model that a run exported."""
    return weights.fingerprint(weights.load(sorted((run / "model").glob("*.safetensors"))))


def _logs(run: Path) -> str:
    return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-1200:]}" for path in run.glob("logs/*"))


class Killer(threading.Thread):
    """Kills the processes that it is given, one after the other and with pauses, until the run ends."""

    def __init__(self, run: subprocess.Popen[bytes], victims: tuple[str, ...], pause: float) -> None:
        super().__init__(daemon=True)
        self._run, self._victims, self._pause = run, victims, pause
        self.killed: list[str] = []

    def run(self) -> None:
        """Kill each victim once."""
        source = random.Random(1)  # noqa: S311
        for victim in self._victims:
            time.sleep(self._pause * source.uniform(0.7, 1.3))  # kills at different moments
            wait_for(partial(self._is_over_or_has, victim), f"process of {victim}", SECONDS)
            for pid in self._pids(victim)[:1]:
                os.kill(pid, signal.SIGKILL)
                self.killed.append(victim)

    def _is_over_or_has(self, victim: str) -> bool:
        return self._run.poll() is not None or bool(self._pids(victim))

    def _pids(self, victim: str) -> list[int]:
        return [pid for pid in tree(self._run.pid) if name_of(pid) == victim and is_alive(pid)]


def kill_and_compare(place: Place, steps: int, *more: str) -> Figures:
    """Train twice, once under kills, and compare the last weights.

    Raises:
        Failed: they differ, or nobody was killed.
    """
    shared = (*settings(place, steps), *more)
    calm = start(place, "calm", shared)
    expected = finish(calm, place, "calm")
    run, checkpoints = start(place, "killed", shared), place.folder / "killed" / "checkpoints"
    wait_for(lambda: checkpoints.is_dir() or run.poll() is not None, "first checkpoint", SECONDS)
    killer = Killer(run, ("trainer", "rollout", "trainer", "node"), pause=2.0)
    killer.start()
    found = finish(run, place, "killed")
    figures: Figures = {"kills": len(killer.killed), "steps": steps, "fingerprint": found["weights"]}
    if len(set(killer.killed)) < 2:
        msg = f"the run was over after kills of {killer.killed}; give it more steps"
        raise Failed(msg)
    if found["weights"] != expected["weights"]:
        msg = f"{expected['weights']} undisturbed, {found['weights']} after kills of {', '.join(killer.killed)}"
        raise Failed(msg)
    return figures


@check("kills_torch", seconds=500, is_alone=True)
def kills_torch(place: Place) -> Figures:
    """`relax up` with the torch engine ends with the same bits after kills of trainer, rollout and node."""
    return kill_and_compare(place, 16 if place.is_short else 60)


@check("kills_megatron", seconds=500, is_alone=True, is_short=False)
def kills_megatron(place: Place) -> Figures:
    """`relax up` with Megatron-Core ends with the same bits after kills of trainer, rollout and node."""
    require("megatron")
    return kill_and_compare(place, 16 if place.is_short else 60, "trainer.backend=megatron")


@check("demo", seconds=400, is_alone=True)
def demo(place: Place) -> Figures:
    """The demo learns to sort: steps, seconds from start to end, rewards."""
    steps = 40 if place.is_short else 400
    more = (f"run.steps={steps}", f"eval.every={steps}", "eval.rows=64")
    began = time.time()
    run = start(place, "demo", (*more, *SHARED, "trainer.device=cuda", "rollout.device=cuda") if place.on_gpu else more)
    result = finish(run, place, "demo", 380)
    if not place.is_short and not result["eval_last"] > result["eval_first"]:
        msg = f"held-out exact match went from {result['eval_first']} to {result['eval_last']}"
        raise Failed(msg)
    figures: Figures = {"steps": steps, "seconds": round(time.time() - began, 1)}
    return figures | {key: value for key, value in result.items() if isinstance(value, int | float)}
