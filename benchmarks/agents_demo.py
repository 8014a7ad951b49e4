"""Train examples/agents/pick.toml on several seeds: share of held-out episodes in which every pick is right."""

from __future__ import annotations

import json
import math
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[1] / "examples" / "agents" / "pick.toml"
DIGITS = 5
RUN_SECONDS = 3600.0


def demo(seeds: list[int], steps: int, results: Path | None) -> dict[str, Any]:
    """Measure the demo on each seed, one run at a time.

    Args:
        seeds: of the runs.
        steps: of training.
        results: file to which each finished run is added; runs that it holds are not repeated.
    """
    found = json.loads(results.read_text()) if results is not None and results.exists() else {}
    for seed in seeds:
        if (key := _key(steps, seed)) not in found:
            found[key] = _measure(seed, steps)
            if results is not None:
                results.write_text(json.dumps(found, indent=1) + "\n")
    runs = [found[_key(steps, seed)] for seed in seeds]
    return {
        "steps": steps,
        "seeds": seeds,
        "random_picks": round(1 / math.factorial(DIGITS), 3),
        **{name: _spread([run[name] for run in runs]) for name in runs[0]},
        "best_possible": 1.0,
    }


def _key(steps: int, seed: int) -> str:
    return f"{steps} steps, seed {seed}"


def _measure(seed: int, steps: int) -> dict[str, float]:
    """Train once; the CPU seconds are those of all processes of the run, their start included."""
    with tempfile.TemporaryDirectory(prefix="relax-agents-") as scratch:
        settings = [f"run.folder={scratch}/run", f"run.seed={seed}", f"run.steps={steps}", "eval.every=0"]
        command = [sys.executable, "-m", "relax_actors.cli.main", "up", str(EXAMPLE), *settings, "--quiet", "--json"]
        before = _cpu_of_children()
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=RUN_SECONDS)
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        summary = json.loads(done.stdout.strip().splitlines()[-1])
        return {
            "after_warm_start": summary["eval_first"],
            "after_training": summary["eval_last"],
            "cpu_seconds": round(_cpu_of_children() - before, 1),
            "seconds": round(summary["seconds"], 1),
        }


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}
