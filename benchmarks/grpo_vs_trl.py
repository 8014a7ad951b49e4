"""Compare GRPO in relax-actors and in TRL's GRPOTrainer without an accelerator: completions per second and memory.

    python benchmarks/grpo_vs_trl.py                          # creates TRL's environment first, 2 GB
    python benchmarks/grpo_vs_trl.py --trl-python PYTHON --json

Runs `relax up` as a user does (broker, supervisor and five actor processes) and TRL's trainer in one process,
interleaved. Both get the same model (Qwen3, hidden 128, 4 layers, 0.8 M parameters, float32, the same random weights),
the same tokenizer, the same prompts (8 per step, 16 tokens each), 8 samples per prompt of exactly 32 new tokens (the
end token is masked out), the same reward, AdamW at 1e-3, no KL term, one torch thread per process. The clipped ratio is
taken against the trainer's own log-probs on both sides, so it is 1 in a step's only update.

The figure of a run is completions per second from the end of step `--warm-up` to the end of the last step but one. It
includes generation, reward, advantages, training, weight transfer, messages and logging; it excludes start, warm-up,
and the files that relax-actors writes at the end (checkpoint, exported model). Memory is the peak of the summed PSS of
all processes of a side over its lifetime, broker and supervisor included, sampled every half second.

Not compared: quality of learning (the rewards are printed as a check that both learn), models and batches of a useful
size, GPUs, TRL with vLLM, more threads (TRL with 2 threads is slower on 2 cores). By default relax-actors generates one
step ahead of the weights (`staleness.max = 1`) and so uses two cores where the synchronous TRL uses one;
`--staleness 0` is on-policy like TRL.
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
import venv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_relax_side import GRPO, Steps, write_toml
from grpo_workload import Workload
from process_memory import PeakMemory
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
RUN_SECONDS = 420.0
REQUIREMENTS = ("torch==2.13.0", "trl==1.16.*")


@dataclass(frozen=True, slots=True)
class Result:
    """One run of one side. `times` are the ends of the steps in Unix seconds; `extra` is printed as it is."""

    times: list[float]
    rewards: list[float]
    peak_mib: float
    processes: int
    extra: dict[str, Any]

    def completions_per_second(self, work: Workload, warm_up: int) -> float:
        """Rate from the end of the warm-up to the end of the last step but one."""
        counted = self.times[warm_up - 1 : -1]
        return (len(counted) - 1) * work.completions / (counted[-1] - counted[0])


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


def measured(command: list[str], work: Workload, log: Path) -> PeakMemory:
    """Run a side's command to its end with its output in `log`; return the memory that it used."""
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
    return memory


def run_relax(work: Workload, turn: int, staleness: int, algorithm: str = GRPO) -> Result:
    """Train with `relax up`, with the TOML sections of an algorithm."""
    name = f"relax-{turn}"
    steps = Steps(work, name)
    steps.start()
    relax = Path(sys.executable).with_name("relax")
    toml = write_toml(work, name, staleness, algorithm)
    memory = measured([str(relax), "up", str(toml), "--json", "--quiet"], work, toml.with_suffix(".log"))
    steps.join(10)
    seen = steps.steps
    wanted = work.completions * work.new_tokens * work.epochs
    if [s["step"] for s in seen] != list(range(work.steps)) or any(s["tokens"] != wanted for s in seen):
        sys.exit(f"{name}: got metrics of {len(seen)} of {work.steps} steps with {wanted} tokens each; {steps.error}")
    extra = {key: statistics.median(s[key] for s in seen) for key in ("waited_seconds", "train_seconds", "staleness")}
    return Result([s["time"] for s in seen], [s["reward"] for s in seen], memory.peak, memory.processes, extra)


def run_trl(work: Workload, turn: int, python: Path, script: str = "grpo_trl_side.py") -> Result:
    """Train with TRL, by a script beside this one."""
    result = Path(work.folder) / f"trl-{turn}.json"
    command = [str(python), str(HERE / script), str(work.save()), str(result)]
    memory = measured(command, work, result.with_suffix(".log"))
    body = json.loads(result.read_text())
    if set(body["lengths"]) != {float(work.new_tokens)} or len(body["times"]) != work.steps:
        sys.exit(f"trl-{turn}: {len(body['times'])} of {work.steps} steps, mean lengths {set(body['lengths'])}")
    return Result(body["times"], body["rewards"], memory.peak, memory.processes, body["versions"])


def report(work: Workload, warm_up: int, sides: dict[str, list[Result]], console: Console) -> dict[str, Any]:
    """Print the figures and return them."""
    table = Table(title=f"{work.completions} completions of {work.new_tokens} tokens per step, {work.steps} steps")
    for column in ("run", "completions/s", "peak MiB", "processes", "reward, first 5", "last 5"):
        table.add_column(column)
    rates: dict[str, list[float]] = {}
    for side, results in sides.items():
        rates[side] = [result.completions_per_second(work, warm_up) for result in results]
        for turn, (result, rate) in enumerate(zip(results, rates[side], strict=True)):
            ends = (f"{statistics.mean(part):.3f}" for part in (result.rewards[:5], result.rewards[-5:]))
            table.add_row(f"{side} {turn}", f"{rate:.1f}", f"{result.peak_mib:.0f}", str(result.processes), *ends)
    console.print(table)
    for side, results in sides.items():
        console.print(f"{side}: " + ", ".join(f"{k} {v}" for k, v in results[-1].extra.items()), highlight=False)
    relax, trl = (statistics.median(rates[side]) for side in ("relax", "trl"))
    peaks = {f"{side}_peak_mib": round(statistics.median(r.peak_mib for r in sides[side])) for side in sides}
    memory = ", ".join(f"{name} {value}" for name, value in peaks.items())
    console.print(f"medians: relax {relax:.1f}, TRL {trl:.1f} completions/s, ratio {relax / trl:.2f}; {memory}")
    return {"ratio": round(relax / trl, 3), "relax": round(relax, 1), "trl": round(trl, 1), **peaks}


def main() -> None:
    """Run both sides interleaved and report."""
    arguments = parse((__doc__ or "").split("\n", 1)[0], "trl-venv")
    python = arguments.trl_python or trl_python(arguments.venv)
    work = Workload(tempfile.mkdtemp(prefix="grpo-vs-trl-"), arguments.steps)
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
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=5, help="steps left out at the start of each run")
    parser.add_argument("--staleness", type=int, default=staleness, help="staleness.max of relax-actors")
    parser.add_argument("--venv", type=Path, default=HERE.parent / ".bench" / environment)
    parser.add_argument("--trl-python", type=Path, help="interpreter of an environment with TRL, instead of --venv")
    parser.add_argument("--keep", action="store_true", help="keep the folder with the runs and logs")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.steps < arguments.warm_up + 3:
        parser.error("--steps must be at least 3 more than --warm-up")
    return arguments


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
        load = os.getloadavg()[0]
        console.print(f"turn {turn + 1} of {arguments.repeats} done, load average {load:.1f}", highlight=False)
    figures = report(work, arguments.warm_up, sides, console)
    if arguments.keep:
        console.print(f"kept {work.folder}", highlight=False)
    else:
        shutil.rmtree(work.folder)
    if arguments.json:
        print(json.dumps(figures | {"steps": arguments.steps, "repeats": arguments.repeats}))


if __name__ == "__main__":
    main()
