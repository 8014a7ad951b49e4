"""Runs in the foreground of a terminal: start or resume, stop by signal, report the result."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog
from rich.console import Console
from rich.table import Table

from broker.files import write_private
from relax_actors.cli.check import require
from relax_actors.config import Config, load_config
from relax_actors.monitoring.summary import Curves, Summary
from relax_actors.monitoring.watcher import Watcher
from relax_actors.runtime import logs
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.root import Root
from relax_actors.supervision.spec import Failure


def train(
    path: Path,
    settings: list[str],
    *,
    as_json: bool,
    quiet: bool,
    roles: list[str] | None = None,
    must_finish: bool = False,
) -> int:
    """Start or resume a run, and wait for its end.

    Args:
        path: TOML file.
        settings: `section.key=value` each.
        as_json: print the result as one line of JSON; all other output goes to stderr.
        quiet: print no progress.
        roles: roles whose actors are started here; all if None.
        must_finish: exit code 1 if stopped before the last step.

    Returns:
        The exit code.

    Raises:
        ConfigError: the configuration cannot work.
    """
    logs.configure()
    console = Console(stderr=as_json)
    config = load_config(path, settings)
    folder = RunFolder(config.folder)
    if (result := _earlier_result(folder, config)) is not None:
        _show(console, result, folder, as_json=as_json)
        return 0
    require(config, roles)
    root = Root(config, str(path.resolve().parent), roles)
    log_to_file(folder)
    watcher = Watcher(root, console, live=console.is_terminal and not quiet, lines=not quiet)
    failure, interrupted = run_root(root, watcher)
    if failure is not None:
        explain(console, failure, folder)
        return 1
    if watcher.result is None:
        step = f"step {watcher.progress.step} of {config.run.steps}"
        console.print(f"stopped at {step}; `relax up {path}` resumes the run", highlight=False, soft_wrap=True)
        return 0 if interrupted and not must_finish else 1
    summary, curves = watcher.result
    summary = replace(summary, seconds_to_first_step=watcher.seconds_to_first_step)
    _plot(curves, folder.reward_plot, f"{config.run.name}: reward by step")
    write_private(folder.summary, json.dumps(summary.json(), indent=1))
    _show(console, summary, folder, as_json=as_json)
    return 0


def run_root(root: Root, watcher: Watcher) -> tuple[Failure | None, bool]:
    """Run a root in this thread until it is finished, gives up, or is stopped by a signal.

    The first SIGINT, SIGTERM or SIGHUP stops the run in order, the second ends this process and all actors at once.

    Returns:
        The failure if supervision gave up, else None; and whether a signal stopped the run.
    """
    interrupted = threading.Event()

    def on_signal(number: int, _frame: Any) -> None:
        if interrupted.is_set():
            # Children die with this process.
            os._exit(128 + number)
        interrupted.set()
        root.tree.stop()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, on_signal)
    watcher.start()
    failure = root.run()
    watcher.halt.set()
    watcher.join(5)
    return failure, interrupted.is_set()


def log_to_file(folder: RunFolder) -> None:
    """Write the log of this process to the run's folder: the terminal shows the run."""
    path = folder.log("root")
    path.parent.mkdir(parents=True, exist_ok=True)
    logs.rotate(path)
    structlog.configure(logger_factory=structlog.WriteLoggerFactory(path.open("a", buffering=1)))


def explain(console: Console, failure: Failure, folder: RunFolder) -> None:
    """Print why supervision gave up, and how to continue."""
    console.print(f"[bold red]supervision gave up: {failure.role}[/]", highlight=False)
    console.print(failure.reason, highlight=False, markup=False, soft_wrap=True)
    if failure.traceback and failure.traceback != failure.reason:
        console.print(failure.traceback.strip(), highlight=False, markup=False, soft_wrap=True, style="dim")
    text = f"its log: {folder.log(failure.role)}; fix the cause, then resume the run with `relax up`"
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _earlier_result(folder: RunFolder, config: Config) -> Summary | None:
    """Return the result of a run that was finished before; None if it has further steps to do."""
    if not folder.summary.exists():
        return None
    summary = Summary(**json.loads(folder.summary.read_text()))
    return summary if summary.steps >= config.run.steps else None


def _plot(curves: Curves, path: Path, title: str) -> None:
    """Plot the reward curves to a PNG file."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120)
    steps, rewards = [s for s, _ in curves.rewards], [r for _, r in curves.rewards]
    axes.plot(steps, rewards, color="tab:blue", alpha=0.25, linewidth=0.8)
    window = max(1, len(rewards) // 50)
    smooth = [
        sum(rewards[max(0, i - window) : i + 1]) / len(rewards[max(0, i - window) : i + 1]) for i in range(len(rewards))
    ]
    axes.plot(steps, smooth, color="tab:blue", label="mean reward of a step")
    if curves.evals:
        axes.plot(*zip(*curves.evals, strict=True), color="tab:orange", marker="o", label="held-out reward, greedy")
    axes.set(xlabel="optimizer step", ylabel="reward", title=title)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _show(console: Console, summary: Summary, folder: RunFolder, *, as_json: bool) -> None:
    table = Table(title=f"run {summary.run}", show_header=False)
    for name, value in summary.json().items():
        if value is not None and name != "run":
            table.add_row(name.replace("_", " "), str(round(value, 4) if isinstance(value, float) else value))
    table.add_row("reward curve", _relative(folder.reward_plot))
    table.add_row("model", _relative(folder.model))
    console.print(table)
    if as_json:
        sys.stdout.write(json.dumps(summary.json()) + "\n")
        sys.stdout.flush()


def _relative(path: Path) -> str:
    """Return a path relative to the working directory where it is below it."""
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)
