"""Every program in benchmarks/ runs with its smallest arguments and prints its figures."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DEADLINE = 240.0
SIDES = {"bus_table_side.py", "bus_tq_side.py", "grpo_trl_side.py", "ppo_trl_side.py", "sft_trl_side.py"}
"""Processes that another program starts."""
MEDIA = ("av", "cv2", "torchaudio")


@dataclass(frozen=True)
class Program:
    """Smallest arguments of a program.

    Attributes:
        arguments: arguments, apart by spaces; {python} is this interpreter.
        figures: regular expressions that its output matches.
        needs: modules and programs without which it is skipped.
        misses: whether its goals cannot be reached with so little work, so that its exit code is 1.
    """

    arguments: str
    figures: tuple[str, ...]
    needs: tuple[str, ...] = ()
    misses: bool = False


PROGRAMS = {
    "agents.py": Program("overhead", (r'"turns_per_second": \d',)),
    "algorithms.py": Program("--presets grpo --seeds 1 --steps 3", (r"grpo",), misses=True),
    "bus.py": Program("--table-only --batches 3 --repeats 1", (r"pipelined, samples/s", r"memory_mib")),
    "collection.py": Program("--steps 4 --repeats 1", (r"CPU ms of the broker: \d",)),
    "commands.py": Program("--rounds 1", (r"status", r"check")),
    "data.py": Program(
        "--rows 2000 --read 200", (r"jsonl +2000 rows: first row", r"parquet +2000", r"arrow +2000", r"mixture +4000")
    ),
    "elastic.py": Program(
        "--parts scale spot --most 2 --seconds 2 --spot-seconds 8",
        (r"scale: first row after +\d", r"spot: .*'vanished': [2-9]", r"rows lost 0"),
    ),
    "engines.py": Program("--tokens 4 --repeats 1", (r"sglang",), ("sglang",)),
    "gpu_check.py": Program("--short --only inventory attention", (r"pass +attention", r"2 pass, 0 fail")),
    "generation.py": Program("--repeats 1", (r"ratio \d",)),
    "grpo_vs_trl.py": Program(
        "--steps 3 --warm-up 1 --repeats 1 --lora 4 --trl-python {python}", (r"completions",), ("trl", "peft")
    ),
    "lora.py": Program("--repeats 1", (r"1\.78%", r"peft takes"), ("peft",)),
    "media.py": Program("--rounds 1", (r"image", r"ratio"), MEDIA),
    "media_parity.py": Program("--count 6", (r"0 differ",), MEDIA),
    "megatron_step.py": Program("--steps 2", (r"ratio",), ("megatron",)),
    "modes.py": Program("--steps 4 --seeds 1 --warm-up 1", (r"colocated",), misses=True),
    "omni.py": Program(
        "--tasks image --seeds 1 --held-out 4 --set run.steps=1 trainer.warmup_steps=0 trainer.warm_start.steps=1",
        (r"image",),
        MEDIA,
        misses=True,
    ),
    "overhead.py": Program("--steps 2", (r"broker +\d", r"overhead +-?\d")),
    "packing.py": Program("--repeats 1", (r"packed", r"\d\.\d")),
    "precision.py": Program(
        "--layers 1 --hidden 32 --vocabulary 64", (r"bfloat16", r"float16", r"float8", r"trained for 4 bits")
    ),
    "ppo_vs_trl.py": Program(
        "--steps 3 --warm-up 1 --repeats 1 --trl-python {python}", (r"completions",), ("trl.experimental.ppo",)
    ),
    "r3.py": Program("--backend torch --steps 2", (r"torch",)),
    "recompute.py": Program("--tokens 512 --layers 2 --hidden 32", (r"none: +\d+ MiB", r"full: +\d+ MiB")),
    "rank_recovery.py": Program(
        "--kills 1 --ranks 2 --seed 3",
        (r"remote rank +killed 1 times: next step after +\d+\.\d s", r"1 kills of 2 ranks: the same weights"),
        ("megatron",),
    ),
    "record.py": Program("--steps 5 --pairs 1", (r"median ratio \d", r"ms of CPU a step")),
    "recovery.py": Program("--kills 1 --targets reward", (r"reward +\d", r"lost 0")),
    "sandbox.py": Program("--trips 2 --rounds 1", (r"sandbox +\d",), ("bwrap",)),
    "scale.py": Program("--actors 2 4 --rows 40 --processes 2 --repeats 1", (r"broker CPU per row",), misses=True),
    "sft_vs_trl.py": Program(
        "--rows 4 --steps 4 --warm-up 1 --repeats 1 --any-load", (r"sft: ratio \d", r"dpo: ratio \d"), ("trl",)
    ),
    "server_weights.py": Program(
        "--hidden 64 --layers 2 --vocabulary 512 --repeats 1", (r"disk +stage", r"shared +stage"), ("sglang",)
    ),
    "simulate.py": Program("--time-scale 0.002 --steps 1", (r"times colocated",), misses=True),
    "soak.py": Program("--steps 24 --every 12", (r"lost 0",), misses=True),
    "start.py": Program("--rounds 1", (r"zygote +\d", r"first step after +\d")),
    "torch_ranks.py": Program("--layers 2 --hidden 32", (r"1 ranks: +\d+ MiB", r"2 ranks: +\d+ MiB a rank")),
    "towers.py": Program(
        "--layouts tp2 --images 2 --patches 64 --depth 1 --steps 1",
        (r"tp2: CPU seconds of a step \d+\.\d+ alone", r"MiB shared \(\d+%\)"),
        ("megatron",),
    ),
    "turns.py": Program(
        "--layers 2 --hidden 128 --steps 2",
        (r"beside each other", r"in turns, memory leaves +│ \d+ +│ [\d.]+ +│ [1-9]"),
    ),
    "vocabulary.py": Program("--tokens 64 --vocabulary 512 --hidden 16", (r"chunks: +\d+ MiB",)),
    "weights.py": Program("--layers 1 --steps 1 --rate 1e-6", (r"\d",)),
}


def missing(name: str) -> bool:
    """Whether neither a module nor a program of this name is installed; a module may be in a package."""
    package = name.rpartition(".")[0]
    return bool(package and missing(package)) or (find_spec(name) is None and shutil.which(name) is None)


def test_every_program_has_an_entry() -> None:
    programs = {path.name for path in BENCHMARKS.glob("*.py") if 'if __name__ == "__main__":' in path.read_text()}
    assert programs - SIDES == set(PROGRAMS), "give a new benchmark its smallest arguments in PROGRAMS"


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_prints_its_figures(name: str, tmp_path: Path) -> None:
    program = PROGRAMS[name]
    if absent := [module for module in program.needs if missing(module)]:
        pytest.skip(f"{name} needs {', '.join(absent)}, not installed here")
    arguments = program.arguments.format(python=sys.executable).split()
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / name), *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    said = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert done.returncode in ((0, 1) if program.misses else (0,)), said
    assert "Traceback" not in done.stderr, said
    for pattern in program.figures:
        assert re.search(pattern, done.stdout), said
