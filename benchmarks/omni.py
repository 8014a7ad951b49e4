"""Train the tasks of examples/omni: held-out accuracy before and after, and with media left out.

    python benchmarks/omni.py [--tasks image omni] [--seeds 1 2 3] [--results FILE.json]

Runs `relax up examples/omni/<task>.toml` for each task and seed, one run at a time, then answers the held-out prompts
again with blank media: black pictures and videos, silence of the same length; of omni also with one of the two media
blank. A model that looks and listens then answers no better than by chance: by the most frequent answer, or by the most
frequent one for what the other medium says. A run takes 2 to 6 minutes on two cores. With `--results` each finished run
is added to a file, and runs that the file holds are not repeated.

Bytes: what the cells and the store hold for a held-out row, and float32 pixel values as transformers' processors make
them (for a sound its spectrogram). Counts: media that were decoded for a row, or shared with another row that has the
same file; the sum is the number of media of a row, because no other role decodes. Exit code 1 if a median is below 0.9
after training, or more than 0.1 above chance with blank media.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import statistics
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash
from rich.console import Console
from rich.table import Table

from relax_actors.messages import PreparedPrompt
from relax_actors.monitoring.connection import connected
from relax_actors.monitoring.recorded import read_metrics

EXAMPLES = Path(__file__).parents[1] / "examples" / "omni"
DATA = EXAMPLES / "data"
VISIBLE = {"blank-images": "heard", "blank-audios": "seen"}
"""Of omni, what a row with one blank medium still says."""
GOAL, SLACK = 0.9, 0.1
RUN_SECONDS = 3600.0


@dataclass(frozen=True)
class Result:
    """One run.

    Attributes:
        task: name of the task.
        seed: seed of the run.
        before: held-out accuracy after the supervised start.
        after: held-out accuracy at the end.
        blank: held-out accuracy without media, by file.
        seconds: duration of the run.
        training: seconds from the first moment that all actors were ready to the end of the run.
        cpu: CPU seconds of all processes of the run, from the command to its end; on a machine with other load this
            figure, not the wall clock, says how long the run takes.
        settings: hash of the configuration file; a result of other settings is not reused.
        cells: bytes of prompt and media in the cells of a held-out row.
        features: bytes in the store for a held-out row, where rows with the same file share them.
        floats: bytes of float32 pixel values of a held-out row.
        decoded: media that the role `media` decoded, for each row of the run.
        shared: media whose features another row had left, for each row of the run.
    """

    task: str
    seed: int
    before: float
    after: float
    blank: dict[str, float]
    seconds: float
    training: float
    cpu: float
    settings: str
    cells: float
    features: float
    floats: float
    decoded: float
    shared: float


def up(folder: Path, config: Path, *settings: str) -> dict[str, Any]:
    """Run `relax up` to its end and return its summary."""
    command = [sys.executable, "-m", "relax_actors.cli.main", "up", str(config), *settings, "--quiet", "--json"]
    done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True, timeout=RUN_SECONDS)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    summary: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return summary


def measure(folder: Path, task: str, seed: int, held_out: int) -> Result:
    """Train once, and answer the held-out prompts without media."""
    name = f"{task}-{seed}"
    cpu = cpu_of_children()
    summary = up(
        folder,
        EXAMPLES / f"{task}.toml",
        f"run.name={name}",
        f"run.seed={seed}",
        f"eval.rows={held_out}",
        "eval.every=0",
    )
    cpu = cpu_of_children() - cpu
    run = folder / "runs" / name
    cells, features, floats = bytes_of_rows(str(run))
    trained = folder / f"{name}.toml"
    trained.write_text(without_model((EXAMPLES / f"{task}.toml").read_text()))
    blank = {
        path.stem: up(
            folder,
            trained,
            f"run.name={name}-{path.stem}",
            f"model.path={run / 'model'}",
            f"data.path={DATA / task / 'train.jsonl'}",
            f"eval.data.path={path}",
            f"eval.rows={held_out}",
            "eval.every=0",
            "run.steps=1",
            "trainer.warmup_steps=0",
        )["eval_first"]
        for path in sorted((DATA / task).glob("blank*.jsonl"))
    }
    decoded, shared = media_of_rows(str(run))
    return Result(
        task,
        seed,
        summary["eval_first"],
        summary["eval_last"],
        blank,
        summary["seconds"],
        summary["seconds"] - summary["seconds_to_ready"],
        cpu,
        settings_of(task),
        cells,
        features,
        floats,
        decoded,
        shared,
    )


def settings_of(task: str) -> str:
    """Return the hash of a task's configuration."""
    return xxhash.xxh3_64_hexdigest((EXAMPLES / f"{task}.toml").read_bytes())


def cpu_of_children() -> float:
    """Return CPU seconds of all processes that this one started and that ended, their children included."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def without_model(text: str) -> str:
    """Return a configuration without the sections that make a model from nothing."""
    sections = re.split(r"^(?=\[)", text, flags=re.MULTILINE)
    return "".join(part for part in sections if not part.startswith(("[model", "[trainer.warm_start]")))


def bytes_of_rows(run: str) -> tuple[float, float, float]:
    """Return mean bytes of a held-out row of the last version in cells, in the store, and as float32 pixel values."""
    cells: dict[tuple[int, int], int] = defaultdict(int)
    stored: dict[str, int] = {}
    floats = 0
    with connected(run) as at:
        subjects = at.table.subjects
        for cell_id, cell in at.table.snapshot([subjects.column(name, "eval") for name in ("prompt", "media")]):
            cells[cell_id.step, cell_id.index] += len(cell.data)
            if cell_id.field == "media":
                for medium in at.table.read(cell.data, PreparedPrompt).media:
                    stored[medium.features.xxh3_128] = medium.features.nbytes
                    # An image has one frame a patch in the store, the tower's input two; and floats have four bytes.
                    floats += medium.features.nbytes * {"image": 8, "video": 4, "audio": 1}[medium.kind]
    return sum(cells.values()) / len(cells), sum(stored.values()) / len(cells), floats / len(cells)


def media_of_rows(run: str) -> tuple[float, float]:
    """Return how many media the role `media` decoded and shared, for each row; both are counted once a row."""
    with connected(run) as at:
        last = read_metrics(at.table, "media")[-1]
    return last["media_processed"] / last["rows"], last["media_shared"] / last["rows"]


def chance(task: str, blank: str, held_out: int) -> float:
    """Return the accuracy of the best answer that looks at no blank medium."""
    rows = [json.loads(line) for line in (DATA / task / "test.jsonl").read_text().splitlines()][:held_out]
    groups: dict[Any, Counter[str]] = defaultdict(Counter)
    for row in rows:
        groups[row.get(VISIBLE.get(blank, ""))][row["answer"]] += 1
    return sum(max(answers.values()) for answers in groups.values()) / len(rows)


def spread(values: list[float], digits: int = 2) -> str:
    """Format a median with the lowest and the highest value."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def tables(results: list[Result], held_out: int) -> tuple[list[Table], list[str]]:
    """Return the tables, and the goals that are missed."""
    columns = ("task", "seeds", "before", "after", "wall clock, s", "CPU, s")
    accuracy = Table(*columns, title="held-out accuracy: median (range)")
    blanks = Table("task", "blank", "accuracy", "chance", title="held-out accuracy with media left out")
    sizes = Table("task", "cells", "store", "float32 values", title="bytes of a held-out row")
    counts = Table("task", "decoded", "shared", title="media of a row, in all roles together")
    missed = []
    for task in dict.fromkeys(each.task for each in results):
        own = [each for each in results if each.task == task]
        after = [each.after for each in own]
        before, seconds = spread([each.before for each in own]), spread([each.training for each in own], 0)
        cpu = spread([each.cpu for each in own], 0)
        accuracy.add_row(task, str(len(own)), before, spread(after), seconds, cpu)
        if statistics.median(after) < GOAL:
            missed.append(f"{task} ends at {statistics.median(after):.2f}, goal {GOAL}")
        for name in own[0].blank:
            values, by_chance = [each.blank[name] for each in own], chance(task, name, held_out)
            blanks.add_row(task, name, spread(values), f"{by_chance:.2f}")
            if statistics.median(values) > by_chance + SLACK:
                missed.append(f"{task} with {name} has {statistics.median(values):.2f}, chance {by_chance:.2f}")
        means = (statistics.mean(getattr(each, name) for each in own) for name in ("cells", "features", "floats"))
        sizes.add_row(task, *(f"{mean:,.0f}" for mean in means))
        counts.add_row(
            task, *(f"{statistics.mean(getattr(e, name) for e in own):.3f}" for name in ("decoded", "shared"))
        )
    return [accuracy, blanks, sizes, counts], missed


def main() -> None:
    """Train all tasks and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = ("image", "sound", "video", "omni")
    parser.add_argument("--tasks", nargs="+", choices=known, default=known, metavar="TASK")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--held-out", type=int, default=512)
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 130)
    subprocess.run([sys.executable, str(EXAMPLES / "make_data.py"), "--tasks", *options.tasks], check=True)
    results = []
    if options.results is not None and options.results.exists():
        results = [Result(**each) for each in json.loads(options.results.read_text())]
    results = [each for each in results if each.settings == settings_of(each.task)]
    done = {(each.task, each.seed) for each in results}
    with tempfile.TemporaryDirectory(prefix="omni-") as scratch:
        for seed in options.seeds:
            for task in options.tasks:
                if (task, seed) in done:
                    continue
                results.append(measure(Path(scratch), task, seed, options.held_out))
                console.print(f"seed {seed}, {task}: {results[-1].before:.2f} to {results[-1].after:.2f}")
                if options.results is not None:
                    options.results.write_text(json.dumps([asdict(each) for each in results], indent=1))
    found, missed = tables([each for each in results if each.task in options.tasks], options.held_out)
    for table in found:
        console.print(table)
    for line in missed:
        console.print(line, style="red")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
