"""Compare fine-tuning on examples (SFT) and on pairs (DPO) with TRL's trainers: trained tokens per second and memory.

    python benchmarks/sft_vs_trl.py                       # both stages, five turns each
    python benchmarks/sft_vs_trl.py --stages dpo --repeats 1 --json

Runs `relax up` as a user does and TRL's trainer in one process, interleaved. Both get the same model (Qwen3, hidden
128, 4 layers, float32, the same random weights), the same rows (prompts of 16 to 200 characters with answers of 8 to
200, a token each), the loss over the answers alone, AdamW at 1e-3, one torch thread per process. TRL packs examples by
best fit and computes pairs without padding. DPO's reference is the start of the run on both sides.

The figure of a run is the tokens of the rows, prompts included, per second from the end of step `--warm-up` to the end
of the last step but one. It excludes start, warm-up and the files written at the end. Memory is the peak of the summed
PSS of all processes of a side. As in `grpo_vs_trl.py`, a run beside busy programs is marked and does not count.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_relax_side import Steps
from grpo_vs_trl import HERE, RELAX, RunMemory, measured
from grpo_workload import ALPHABET, ARCHITECTURE, END, Workload
from rich.console import Console
from rich.table import Table

STAGES = ("sft", "dpo")
SIZES = {"max_position_embeddings": 2048}
PROMPT, ANSWER = (16, 200), (8, 200)
TOML = """
[run]
name = "{name}"
folder = {folder}
seed = {seed}
steps = {steps}

[model]
path = {model}

[data]
kind = "jsonl"
path = {prompts}
{names}

[algorithm]
name = "{stage}"

[trainer]
prompts_per_step = {rows}
learning_rate = {learning_rate}
max_tokens_per_microbatch = 4096
checkpoint_every = {steps}
"""


@dataclass(frozen=True, slots=True)
class Result:
    """One run of one side: ends of the steps in Unix seconds, tokens of each, and what the processes used."""

    times: list[float]
    tokens: list[int]
    memory: RunMemory

    def rate(self, warm_up: int) -> float:
        """Tokens per second from the end of the warm-up to the end of the last step but one."""
        counted = self.times[warm_up - 1 : -1]
        return sum(self.tokens[warm_up:-1]) / (counted[-1] - counted[0])


def make_rows(work: Workload, stage: str) -> None:
    """Write the model folder and the rows of a stage."""
    replace(work, steps=0).make()
    source = random.Random(work.seed)  # noqa: S311 not a secret
    letters = ALPHABET.replace(END, "")

    def text(sizes: tuple[int, int]) -> str:
        return "".join(source.choices(letters, k=source.randint(*sizes)))

    names = ("completion",) if stage == "sft" else ("chosen", "rejected")
    rows = ({"prompt": text(PROMPT)} | {name: text(ANSWER) for name in names} for _ in range(work.rows * work.steps))
    work.prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_relax(work: Workload, stage: str, turn: int) -> Result:
    """Train with `relax up`."""
    name = f"{stage}-{turn}"
    fields = {"seed": work.seed, "steps": work.steps, "rows": work.rows, "learning_rate": work.learning_rate}
    paths = {"folder": Path(work.folder) / name, "model": work.model, "prompts": work.prompts}
    toml = Path(work.folder) / f"{name}.toml"
    quoted = {key: json.dumps(str(path)) for key, path in paths.items()}
    names = 'fields = { answer = "completion" }' if stage == "sft" else ""
    toml.write_text(TOML.format(name=name, stage=stage, names=names, **fields, **quoted))
    steps = Steps(work, name)
    steps.start()
    memory = measured([*RELAX, "up", str(toml), "--json", "--quiet"], work, toml.with_suffix(".log"))
    steps.join(10)
    if [step["step"] for step in steps.steps] != list(range(work.steps)):
        sys.exit(f"{name}: got metrics of {len(steps.steps)} of {work.steps} steps; {steps.error}")
    return Result([step["time"] for step in steps.steps], [], memory)


def run_trl(work: Workload, stage: str, turn: int, python: str) -> Result:
    """Train with TRL."""
    result = Path(work.folder) / f"trl-{stage}-{turn}.json"
    command = [python, str(HERE / "sft_trl_side.py"), stage, str(work.save()), str(result)]
    memory = measured(command, work, result.with_suffix(".log"))
    body = json.loads(result.read_text())
    return Result(body["times"], body["tokens"], memory)


def tokens_of_rows(work: Workload, stage: str) -> float:
    """Return the mean tokens of a step of relax-actors, whose rows are all of the data once in another order."""
    names = ("completion",) if stage == "sft" else ("chosen", "rejected")
    rows = [json.loads(line) for line in work.prompts.read_text().splitlines()]
    return sum(len(row["prompt"]) + len(row[name]) + 1 for row in rows for name in names) / work.steps


def compare(stage: str, arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run both sides of a stage in turns; print and return the figures."""
    rows = arguments.rows if stage == "sft" else arguments.rows // 2
    mean = sum(PROMPT) // 2 + sum(ANSWER) // 2 + 1
    folder = tempfile.mkdtemp(prefix=f"{stage}-vs-trl-")
    work = Workload(
        folder, arguments.steps, rows=rows, samples=1, prompt_tokens=mean, architecture=ARCHITECTURE | SIZES
    )
    make_rows(work, stage)
    tokens, sides = tokens_of_rows(work, stage), {"relax": list[Result](), "trl": list[Result]()}
    for turn in range(arguments.repeats):
        found = run_relax(work, stage, turn)
        sides["relax"].append(replace(found, tokens=[round(tokens)] * work.steps))
        sides["trl"].append(run_trl(work, stage, turn, arguments.trl_python))
    shutil.rmtree(folder)
    rates = {side: [result.rate(arguments.warm_up) for result in results] for side, results in sides.items()}
    table = Table(title=f"{stage}: {work.steps} steps of about {tokens:.0f} tokens")
    for column in ("run", "tokens/s", "peak MiB", "load average", "others busy"):
        table.add_column(column)
    for side, results in sides.items():
        for turn, result in enumerate(results):
            memory, load = result.memory, result.memory.load
            busy = f"{load.busy[0]:.0%}, {load.busy[1]:.0%}" + ("" if load.is_quiet else " NOT QUIET")
            averages = f"{load.averages[0]:.1f}, {load.averages[1]:.1f}"
            table.add_row(f"{side} {turn}", f"{rates[side][turn]:.0f}", f"{memory.peak_mib:.0f}", averages, busy)
    console.print(table)
    ratios = [ours / theirs for ours, theirs in zip(rates["relax"], rates["trl"], strict=True)]
    return {
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "quiet": all(result.memory.load.is_quiet for results in sides.values() for result in results),
        **{side: round(statistics.median(rates[side])) for side in sides},
        **{f"{side}_peak_mib": round(statistics.median(r.memory.peak_mib for r in sides[side])) for side in sides},
    }


def main() -> None:
    """Compare the stages and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--rows", type=int, default=32, help="examples of a step; half as many pairs")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=4, help="steps left out at the start of each run")
    parser.add_argument("--trl-python", default=sys.executable, help="interpreter of an environment with TRL")
    parser.add_argument("--any-load", action="store_true", help="exit with 0 although other programs were busy")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.steps < arguments.warm_up + 3:
        parser.error("--steps must be at least 3 more than --warm-up")
    console = Console(stderr=arguments.json)
    figures = {stage: compare(stage, arguments, console) for stage in arguments.stages}
    for stage, found in figures.items():
        console.print(f"{stage}: " + ", ".join(f"{name} {value}" for name, value in found.items()), highlight=False)
    if arguments.json:
        print(json.dumps(figures))
    if not (arguments.any_load or all(found["quiet"] for found in figures.values())):
        sys.exit(1)


if __name__ == "__main__":
    main()
