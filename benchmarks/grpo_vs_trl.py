"""Compare GRPO in relax-actors and in TRL's GRPOTrainer without an accelerator: completions per second and memory.

    python benchmarks/grpo_vs_trl.py                          # creates TRL's environment first, 2 GB
    python benchmarks/grpo_vs_trl.py --repeats 1 --json       # one turn, about three minutes
    python benchmarks/grpo_vs_trl.py --lora 16                # both train an adapter of this rank, TRL's by PEFT

Runs `relax up` as a user does (broker, supervisor and five actor processes) and TRL's trainer in one process,
interleaved. Both get the same model (Qwen3, hidden 128, 4 layers, 0.8 M parameters, float32, the same random weights),
the same tokenizer, the same prompts (8 per step, 16 tokens each), 8 samples per prompt of exactly 32 new tokens (the
end token is masked out), the same reward, AdamW at 1e-3, no KL term, one torch thread per process. The clipped ratio is
taken against the trainer's own log-probs on both sides, so it is 1 in a step's only update.

A turn runs both sides, one after the other, with one setting for rate and reward. The result is the median over the
turns of the ratio of both rates, and of the difference between the mean rewards of the last five steps. Before and
after each run the load averages and the share of the processors that other programs keep busy are measured; if that
share exceeds 10 %, the run is marked, the figures do not count, and the program exits with 1 (0 with `--any-load`).

The figure of a run is completions per second from the end of step `--warm-up` to the end of the last step but one. It
includes generation, reward, advantages, training, weight transfer, messages and logging; it excludes start, warm-up,
and the files that relax-actors writes at the end (checkpoint, exported model). Memory is the peak of the summed PSS of
all processes of a side over its lifetime, broker and supervisor included, read when their resident memory
grows, and every five seconds.

Not compared: models and batches of a useful size, GPUs, TRL with vLLM, more threads (TRL with 2 threads is slower on 2
cores). By default relax-actors generates one step ahead of the weights (`staleness.max = 1`) and so uses two cores
where the synchronous TRL uses one; `--staleness 0` is on-policy like TRL.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_relax_side import GRPO, Algorithm, Steps, write_toml
from grpo_workload import Workload
from process_memory import PeakMemory
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
RELAX = (sys.executable, "-m", "relax_actors.cli.main")
RUN_SECONDS = 420.0
LOAD_SECONDS = 3.0
QUIET_SHARE = 0.1
"""Largest share of the processors that other programs may keep busy before and after a run."""
REQUIREMENTS = ("torch==2.13.0", "trl==1.16.*", "peft==0.21.*")


@dataclass(frozen=True, slots=True)
class Load:
    """Load average of the last minute and busy share of the processors, before and after a run."""

    averages: tuple[float, float]
    busy: tuple[float, float]

    @property
    def is_quiet(self) -> bool:
        """Whether other programs left the processors alone."""
        return max(self.busy) <= QUIET_SHARE


@dataclass(frozen=True, slots=True)
class RunMemory:
    """Peak of the summed PSS of a run's processes, their number, and what other programs did before and after."""

    peak_mib: float
    processes: int
    load: Load


@dataclass(frozen=True, slots=True)
class Result:
    """One run of one side.

    Attributes:
        times: ends of the steps in Unix seconds.
        rewards: mean reward of each step.
        memory: what the run's processes used.
        extra: further figures, printed as they are.
    """

    times: list[float]
    rewards: list[float]
    memory: RunMemory
    extra: dict[str, Any]

    def completions_per_second(self, work: Workload, warm_up: int) -> float:
        """Rate from the end of the warm-up to the end of the last step but one."""
        counted = self.times[warm_up - 1 : -1]
        return (len(counted) - 1) * work.completions / (counted[-1] - counted[0])

    @property
    def last_reward(self) -> float:
        """Mean reward of the last five steps."""
        return statistics.mean(self.rewards[-5:])


def trl_python(folder: Path, requirements: Sequence[str] = REQUIREMENTS) -> Path:
    """Return the interpreter of TRL's environment in `folder`; create the environment if it is missing."""
    python = folder / "bin" / "python"
    done = folder / "installed"
    if not done.exists():
        venv.create(folder, with_pip=True, clear=True)
        for requirement in requirements:  # torch first, so that pip keeps this version
            subprocess.run([python, "-m", "pip", "install", "--quiet", requirement], check=True)
        done.touch()
    return python


def load_now() -> tuple[float, float]:
    """Return the load average of the last minute, and the share of the processors that is busy for some seconds."""
    before = cpu_ticks()
    time.sleep(LOAD_SECONDS)
    busy, total = (now - then for now, then in zip(cpu_ticks(), before, strict=True))
    return os.getloadavg()[0], busy / total


def cpu_ticks() -> tuple[int, int]:
    """Return the ticks in which the processors worked for this or another virtual machine, and all ticks."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def measured(command: list[str], work: Workload, log: Path) -> RunMemory:
    """Run a side's command to its end with its output in `log`; return the memory that it used."""
    average, busy = load_now()
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"OMP_NUM_THREADS": str(work.threads), "PYTHONPATH": path}
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, cwd=work.folder)
        memory = PeakMemory(process.pid)
        memory.start()
        try:
            code = process.wait(RUN_SECONDS)
        finally:
            process.terminate()
            memory.stop()
    if code:
        sys.exit(f"{command[0]} ended with exit code {code}; end of {log}:\n{log.read_text()[-2000:]}")
    after, busy_after = load_now()
    return RunMemory(memory.peak, memory.processes, Load((average, after), (busy, busy_after)))


def run_relax(work: Workload, turn: int, staleness: int, algorithm: Algorithm = GRPO) -> Result:
    """Train with `relax up`, with an algorithm."""
    name = f"relax-{turn}"
    steps = Steps(work, name)
    steps.start()
    toml = write_toml(work, name, staleness, algorithm)
    memory = measured([*RELAX, "up", str(toml), "--json", "--quiet"], work, toml.with_suffix(".log"))
    steps.join(10)
    seen = steps.steps
    wanted = work.completions * work.new_tokens * work.epochs
    if [s["step"] for s in seen] != list(range(work.steps)) or any(s["tokens"] != wanted for s in seen):
        sys.exit(f"{name}: got metrics of {len(seen)} of {work.steps} steps with {wanted} tokens each; {steps.error}")
    extra = {key: statistics.median(s[key] for s in seen) for key in ("waited_seconds", "train_seconds", "staleness")}
    return Result([s["time"] for s in seen], [s["reward"] for s in seen], memory, extra)


def run_trl(work: Workload, turn: int, python: Path, script: str = "grpo_trl_side.py") -> Result:
    """Train with TRL, by a script beside this one."""
    result = Path(work.folder) / f"trl-{turn}.json"
    command = [str(python), str(HERE / script), str(work.save()), str(result)]
    memory = measured(command, work, result.with_suffix(".log"))
    body = json.loads(result.read_text())
    if set(body["lengths"]) != {float(work.new_tokens)} or len(body["times"]) != work.steps:
        sys.exit(f"trl-{turn}: {len(body['times'])} of {work.steps} steps, mean lengths {set(body['lengths'])}")
    return Result(body["times"], body["rewards"], memory, body["versions"])


def report(work: Workload, warm_up: int, sides: dict[str, list[Result]], console: Console) -> dict[str, Any]:
    """Print the figures and return them."""
    table = Table(title=f"{work.completions} completions of {work.new_tokens} tokens per step, {work.steps} steps")
    columns = (
        "run",
        "completions/s",
        "reward, last 5",
        "first 5",
        "peak MiB",
        "processes",
        "load average",
        "others busy",
    )
    for column in columns:
        table.add_column(column)
    rates = {side: [r.completions_per_second(work, warm_up) for r in results] for side, results in sides.items()}
    for side, results in sides.items():
        for turn, (result, rate) in enumerate(zip(results, rates[side], strict=True)):
            table.add_row(f"{side} {turn}", f"{rate:.1f}", *described(result))
    console.print(table)
    for side, results in sides.items():
        console.print(f"{side}: " + ", ".join(f"{k} {v}" for k, v in results[-1].extra.items()), highlight=False)
    turns = list(zip(sides["relax"], sides["trl"], strict=True))
    ratios = [ours / theirs for ours, theirs in zip(rates["relax"], rates["trl"], strict=True)]
    differences = [ours.last_reward - theirs.last_reward for ours, theirs in turns]
    quiet = all(result.memory.load.is_quiet for results in sides.values() for result in results)
    figures: dict[str, Any] = {
        "ratio": round(statistics.median(ratios), 3),
        "reward_difference": round(statistics.median(differences), 4),
        "quiet": quiet,
        "ratios": [round(ratio, 3) for ratio in ratios],
        "reward_differences": [round(difference, 4) for difference in differences],
        **{side: round(statistics.median(rates[side]), 1) for side in sides},
        **{f"{side}_reward": round(statistics.median(r.last_reward for r in sides[side]), 4) for side in sides},
        **{f"{side}_peak_mib": round(statistics.median(r.memory.peak_mib for r in sides[side])) for side in sides},
    }
    console.print(", ".join(f"{name} {value}" for name, value in figures.items()), highlight=False)
    if not quiet:
        console.print("NOT QUIET: other programs were busy before or after a run; these figures do not count")
    return figures


def described(result: Result) -> tuple[str, ...]:
    """Return the cells of a run in the table."""
    memory, load = result.memory, result.memory.load
    return (
        f"{result.last_reward:.3f}",
        f"{statistics.mean(result.rewards[:5]):.3f}",
        f"{memory.peak_mib:.0f}",
        str(memory.processes),
        f"{load.averages[0]:.1f}, {load.averages[1]:.1f}",
        f"{load.busy[0]:.0%}, {load.busy[1]:.0%}" + ("" if load.is_quiet else " NOT QUIET"),
    )


def main() -> None:
    """Run both sides interleaved and report."""
    arguments = parse((__doc__ or "").split("\n", 1)[0], "trl-venv")
    python = arguments.trl_python or trl_python(arguments.venv)
    work = Workload(
        tempfile.mkdtemp(prefix="grpo-vs-trl-"), arguments.steps, rollouts=arguments.rollouts, lora_rank=arguments.lora
    )
    compare(
        arguments,
        work,
        lambda turn: run_relax(work, turn, arguments.staleness),
        lambda turn: run_trl(work, turn, python),
    )


def parse(description: str, environment: str, staleness: int = 1) -> argparse.Namespace:
    """Parse the command line.

    Args:
        description: text of `--help`.
        environment: default name of the folder of TRL's environment.
        staleness: default of `--staleness`.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=5, help="steps left out at the start of each run")
    parser.add_argument("--staleness", type=int, default=staleness, help="staleness.max of relax-actors")
    parser.add_argument("--rollouts", type=int, default=1, help="rollout actors of relax-actors")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train an adapter instead of all weights")
    parser.add_argument("--venv", type=Path, default=HERE.parent / ".bench" / environment)
    parser.add_argument(
        "--trl-python", type=_absolute, help="interpreter of an environment with TRL, instead of --venv"
    )
    parser.add_argument("--any-load", action="store_true", help="exit with 0 although other programs were busy")
    parser.add_argument("--keep", action="store_true", help="keep the folder with the runs and logs")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.steps < arguments.warm_up + 3:
        parser.error("--steps must be at least 3 more than --warm-up")
    return arguments


def _absolute(text: str) -> Path:
    """Return a path for another working directory; links stay, since an environment's interpreter is one."""
    return Path(text).absolute()


def compare(
    arguments: argparse.Namespace,
    work: Workload,
    relax_side: Callable[[int], Result],
    trl_side: Callable[[int], Result],
) -> None:
    """Run both sides in turns, print the figures, and remove the folder."""
    console = Console(stderr=arguments.json)
    work.make()
    sides: dict[str, list[Result]] = {"relax": [], "trl": []}
    for turn in range(arguments.repeats):
        sides["relax"].append(relax_side(turn))
        sides["trl"].append(trl_side(turn))
        console.print(f"turn {turn + 1} of {arguments.repeats} done", highlight=False)
    figures = report(work, arguments.warm_up, sides, console)
    if arguments.keep:
        console.print(f"kept {work.folder}", highlight=False)
    else:
        shutil.rmtree(work.folder)
    if arguments.json:
        print(json.dumps(figures | {"steps": arguments.steps, "repeats": arguments.repeats}))
    if not (figures["quiet"] or arguments.any_load):
        sys.exit(1)


if __name__ == "__main__":
    main()
