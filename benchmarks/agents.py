"""Measure episodes: overhead of a turn, time lost to waiting for environments, turns lost to kills, and success.

    overhead     CPU time of a turn with an environment that costs nothing, 256 episodes at once
    waiting      share of engine time lost to environments of 50 ms to 2 s, with and without a barrier a turn
    resumption   64 episodes of 20 turns a step; rollout, environment, trainer, reward, broker and node killed 30 times:
                 turns generated twice, with turn cells and without
    demo         share of held-out episodes of examples/agents/pick.toml that succeed, before and after training; with
                 `--results FILE.json` finished runs are kept and not repeated

The first three are runs of `relax up` with an engine that computes nothing (benchmarks/agents_parts.py): a token takes
a given time, whatever the number of episodes. CPU times are those of the rollout's process and of all processes of the
environments.

    python benchmarks/agents.py overhead|waiting|resumption|demo [--kills 30] [--seeds 1 2 3] [--steps 100]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from agents_demo import demo
from agents_parts import BUSY, COUNT
from live_run import name_of, wait_for
from process_memory import tree

CONFIG = """
[run]
steps = {steps}
[model.architecture]
model_type = "qwen3"
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 1
num_key_value_heads = 1
head_dim = 16
max_position_embeddings = 1024
tie_word_embeddings = true
[model.tokenizer]
alphabet = "0123456789>#"
[data]
kind = "python"
function = "agents_parts.make"
[environment]
name = "agents_parts.Count"
sessions = 512
max_turns = 1000
[rollout]
backend = "agents_parts.PacedBackend"
group_size = 8
max_tokens = 8
[trainer]
prompts_per_step = {rows}
max_tokens_per_microbatch = 16384
checkpoint_every = 1000
[supervision]
intensity = 100000
backoff_max = 0.3
max_kills = 1000
"""
TICKS = os.sysconf("SC_CLK_TCK")
GROUP = 8
VICTIMS = ("rollout", "environment", "trainer", "reward", "broker", "node")
INTERVAL = 0.3
"""Seconds between two looks at the CPU times."""


@dataclass
class Measured:
    """A run: seconds from the first turn to the end, turns, seconds with a turn, CPU seconds by process.

    `between` are the seconds between two tokens of turns that were running.
    """

    seconds: float
    turns: int
    busy: float
    between: float
    cpu: dict[str, float]
    kills: int


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and of its children that have ended."""
    try:
        fields = (Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / TICKS


def cpu_of(root: int) -> dict[str, float]:
    """CPU time of the rollout, and of the environments' actors with all that they have started."""
    found = {"rollout": 0.0, "environment": 0.0}
    for pid in tree(root):
        name = name_of(pid)
        if name == "rollout":
            found[name] += cpu_seconds(pid)
        elif name == "environment":
            found[name] += sum(map(cpu_seconds, tree(pid)))
    return found


def measure(rows: int, steps: int, settings: list[str], kills: int = 0, seed: int = 1) -> Measured:
    """Run, and kill a process of `VICTIMS` at random moments."""
    with tempfile.TemporaryDirectory(prefix="relax-agents-") as scratch:
        folder = Path(scratch)
        (folder / "run.toml").write_text(CONFIG.format(rows=rows, steps=steps))
        files = {COUNT: folder / "turns", BUSY: folder / "busy"}
        for path in files.values():
            path.touch()
        here = str(Path(__file__).parent)
        path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))
        environ = os.environ | {"PYTHONPATH": path} | {name: str(file) for name, file in files.items()}
        command = [sys.executable, "-m", "relax_actors.cli.main", "up", str(folder / "run.toml"), "--quiet", *settings]
        process = subprocess.Popen([*command, f"run.folder={folder / 'run'}"], env=environ, stdout=subprocess.DEVNULL)
        try:
            wait_for(lambda: files[COUNT].stat().st_size or process.poll() is not None, "first turn", 600)
            began, first, source, done, cpu = time.monotonic(), cpu_of(process.pid), np.random.default_rng(seed), 0, {}
            last, due, turns = began, began + source.uniform(0.5, 1.5), 0
            while process.poll() is None:
                now = time.monotonic()
                # Until the last turn; the end of a run takes a second.
                if now - last > INTERVAL and turns < (so_far := files[COUNT].stat().st_size):
                    last, turns, cpu = now, so_far, cpu_of(process.pid)
                if done < kills and now > due and kill(process.pid, str(source.choice(VICTIMS))):
                    done, due = done + 1, now + source.uniform(0.5, 1.5)
                time.sleep(0.02)
            if process.returncode:
                sys.exit(f"the run failed with exit code {process.returncode}")
            busy, between = np.loadtxt(files[BUSY], ndmin=2).sum(0).tolist()
            used = {name: cpu.get(name, 0.0) - first[name] for name in first}
            return Measured(last - began, files[COUNT].stat().st_size, busy, between, used, done)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(60)


def kill(root: int, name: str) -> bool:
    """Kill an actor; False if it has no process now."""
    pids = [pid for pid in tree(root) if name_of(pid) == name]
    if pids:
        os.kill(pids[0], signal.SIGKILL)
    return bool(pids)


def overhead() -> dict[str, float]:
    """Measure the CPU time of a turn."""
    turns = [
        "environment.options.turns=10",
        "environment.replicas=4",
        "rollout.max_concurrent_prompts=32",
        "staleness.max=1",
    ]
    found = measure(32, 3, turns)
    per_turn = {name: round(1000 * seconds / found.turns, 3) for name, seconds in found.cpu.items()}
    return {"turns": found.turns, "turns_per_second": round(found.turns / found.seconds, 1)} | {
        f"{name}_cpu_ms_a_turn": value for name, value in per_turn.items()
    }


def waiting() -> dict[str, float]:
    """Measure the time in which no turn runs because all environments are at work, and the time between tokens."""
    common = ["environment.options.turns=8", "environment.options.shortest=0.05", "environment.options.longest=2.0"]
    # All rows are admitted at once, so that the engine waits for environments alone.
    common += ["rollout.max_concurrent_prompts=16", "rollout.options.token_seconds=0.02", "staleness.max=3"]
    found = {}
    for name, settings in (("turns_join", []), ("barrier", ["rollout.actor=agents_parts.Barrier"])):
        measured = measure(16, 3, [*common, *settings])
        found[f"{name}_seconds"] = round(measured.seconds, 1)
        found[f"{name}_waiting_seconds"] = round(measured.seconds - measured.busy, 2)
        found[f"{name}_seconds_between_tokens"] = round(measured.between, 2)
    found["waiting_share_of_barrier"] = round(found["turns_join_waiting_seconds"] / found["barrier_waiting_seconds"], 3)
    return found


def resumption(kills: int) -> dict[str, float]:
    """Measure the turns that kills cost, with turn cells and without."""
    common = ["environment.options.turns=20", "environment.options.longest=0.2", "rollout.max_concurrent_prompts=8"]
    common += ["rollout.options.token_seconds=0.01", "staleness.max=0", "supervision.ack_wait=1"]
    steps, found = 4, {}
    for name, after in (("turn_cells", "0"), ("restart", "100000")):
        measured = measure(8, steps, [*common, f"rollout.turn_log_after={after}"], kills)
        needed = steps * 8 * GROUP * 20
        found[f"{name}_kills"] = measured.kills
        found[f"{name}_turns_generated_twice"] = measured.turns - needed
        found[f"{name}_seconds"] = round(measured.seconds, 1)
    return {"turns_needed": needed, **found}


def main() -> None:
    """Print a measurement as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["overhead", "waiting", "resumption", "demo"])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--results", type=Path, help="file of finished runs of `demo`")
    options = parser.parse_args()
    measurements = {
        "overhead": overhead,
        "waiting": waiting,
        "resumption": lambda: resumption(options.kills),
        "demo": lambda: demo(options.seeds, options.steps, options.results),
    }
    print(json.dumps(measurements[options.what](), indent=1))


if __name__ == "__main__":
    main()
