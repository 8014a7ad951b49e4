"""Results of finished runs on the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from rich.table import Table

from relax_actors.cli.command_lines import command_line, relative
from relax_actors.monitoring.screen import Screen
from relax_actors.monitoring.summary import Curves, Summary
from relax_actors.runtime.run_folder import RunFolder


def plot(curves: Curves, path: Path, title: str) -> None:
    """Plot the curves to a PNG file."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120)
    steps, values = [step for step, _ in curves.steps], [value for _, value in curves.steps]
    axes.plot(steps, values, color="tab:blue", alpha=0.25, linewidth=0.8)
    window = max(1, len(values) // 50)
    near = [values[max(0, i - window) : i + 1] for i in range(len(values))]
    smooth = [sum(each) / len(each) for each in near]
    axes.plot(steps, smooth, color="tab:blue", label=f"mean {curves.figure} of a step")
    if curves.evals:
        axes.plot(*zip(*curves.evals, strict=True), color="tab:orange", marker="o", label="held-out reward, greedy")
    axes.set(xlabel="optimizer step", ylabel=curves.figure, title=title)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def show(console: Screen, summary: Summary, folder: RunFolder, *, as_json: bool) -> None:
    """Show the result of a run, and commands that show more."""
    table = Table(title=f"run {summary.run}", show_header=False)
    for name, value in summary.json().items():
        if value is not None and name != "run":
            table.add_row(name.replace("_", " "), str(round(value, 4) if isinstance(value, float) else value))
    if folder.reward_plot.exists():
        table.add_row("curve", relative(folder.reward_plot))
    table.add_row("model", relative(folder.model))
    console.print(table)
    for line in _next_commands(summary.run, folder):
        console.show(line)
    if as_json:
        sys.stdout.write(json.dumps(summary.json()) + "\n")
        sys.stdout.flush()


def show_stages(console: Screen, finished: Mapping[str, Summary], *, as_json: bool) -> None:
    """Show the stages beside each other."""
    columns = {
        "reward first": "reward_first",
        "reward last": "reward_last",
        "loss first": "loss_first",
        "loss last": "loss_last",
        "held out first": "eval_first",
        "held out last": "eval_last",
    }
    table = Table("stage", "steps", *columns)
    for name, summary in finished.items():
        figures = summary.json()
        shown = ["" if figures[key] is None else f"{figures[key]:.4g}" for key in columns.values()]
        table.add_row(name, str(summary.steps), *shown)
    console.print(table)
    if as_json:
        sys.stdout.write(json.dumps({"stages": {name: summary.json() for name, summary in finished.items()}}) + "\n")
        sys.stdout.flush()


def _next_commands(run: str, folder: RunFolder) -> list[str]:
    """Return command lines that show more of a finished run."""
    usual = folder.root == (Path("runs") / run).resolve()
    name = run if usual else relative(folder.root)
    commands = {command_line("console", name): "curves, samples and actors in a browser"}
    commands[command_line("status", name)] = "step, rows by state"
    commands[command_line("ledger", name)] = "what became of every row"
    if usual:
        commands[command_line("tail", f"relax.{run}.event.>", "--history")] = "all events of the run"
    width = max(map(len, commands))
    return ["look further:", *(f"  {line:<{width}}  # {what}" for line, what in commands.items())]
