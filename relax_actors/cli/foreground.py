"""Runs in the foreground of a terminal: start or resume, stop by signal, report the result."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from broker.errors import BrokerError
from broker.files import write_private
from relax_actors.checks import require
from relax_actors.cli.command_lines import command_line
from relax_actors.cli.notifier_process import NotifierProcess, outcome
from relax_actors.cli.results import plot, show, show_stages
from relax_actors.config import Config, load_config, validate
from relax_actors.config.load import set_by, stages_of
from relax_actors.config.masking import masked_argument
from relax_actors.config.notes import shortened
from relax_actors.config.saved import import_path_of
from relax_actors.data.epochs import with_epochs
from relax_actors.devices.inventory import NO_REQUEST, GpuRequest
from relax_actors.errors import ConfigError
from relax_actors.isolation.orphans import become_subreaper
from relax_actors.monitoring.screen import Screen
from relax_actors.monitoring.summary import Curves, Summary
from relax_actors.monitoring.watcher import Watcher
from relax_actors.printable import printable_lines
from relax_actors.runtime import logs
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.discard import discard_all
from relax_actors.supervision.resume import Effect, compare, continues, listed
from relax_actors.supervision.root import Root
from relax_actors.supervision.spec import Failure

SHOW_CURSOR = "\x1b[?25h"


@dataclass(frozen=True, slots=True)
class Request:
    """Arguments and options of one `relax up`.

    Attributes:
        path: TOML file.
        settings: `section.key=value` each.
        roles: roles whose actors are started here; all if None.
        gpus: GPUs of this machine that they may use.
        as_json: print the result as one line of JSON; all other output goes to stderr.
        quiet: print no progress.
        must_finish: exit code 1 if stopped before the last step.
        fresh: remove the run that the folder holds, or those of all stages.
        console: print a link to the web console, which starts when somebody opens it.
        command: the command and its arguments before the path.
        options: further options of the command.
    """

    path: Path
    settings: tuple[str, ...] = ()
    roles: tuple[str, ...] | None = None
    gpus: GpuRequest = NO_REQUEST
    as_json: bool = False
    quiet: bool = False
    must_finish: bool = False
    fresh: bool = False
    console: bool = False
    command: tuple[str, ...] = ("up",)
    options: tuple[str, ...] = ()

    @property
    def resume_command(self) -> str:
        """Command line that resumes the run; `***` stands for secrets in it."""
        options = [] if self.roles is None else ["--roles", ",".join(self.roles)]
        options += ["--gpus", self.gpus.gpus] if self.gpus.gpus else []
        options += ["--simulate-gpus", self.gpus.simulated] if self.gpus.simulated else []
        flags = {"--json": self.as_json, "--quiet": self.quiet, "--must-finish": self.must_finish}
        options += [name for name, is_set in flags.items() if is_set]
        options += self.options
        return command_line(*self.command, str(self.path), *map(masked_argument, self.settings), *options)


def train(request: Request) -> int:
    """Start or resume a run or stages, wait for the end, and return the exit code.

    Raises:
        ConfigError: the configuration cannot work, or the folder holds a run with other settings.
    """
    logs.configure()
    console = Screen(stderr=request.as_json)
    if stages := stages_of(request.path, list(request.settings)):
        return _train_stages(request, console, stages)
    config = with_epochs(load_config(request.path, list(request.settings)))
    return _train_run(request, console, config, replace_finished=request.fresh)


def _train_stages(request: Request, console: Screen, names: Sequence[str]) -> int:
    """Train the first unfinished stage, then continue as a new process.

    The stages themselves are all that is remembered of their sequence, so the same command goes on after any end.

    Raises:
        ConfigError: as `train`; or a stage has steps to train although a later one has begun with its model.
    """
    configs = [load_config(request.path, [*request.settings, f"run.stage={name}"]) for name in names]
    folders = [RunFolder(config.folder) for config in configs]
    if request.fresh:
        # As before any start; what later stages lack is only known once their model is there.
        spelled = set_by(request.path, [*request.settings, f"run.stage={names[0]}"])
        require(with_epochs(configs[0]), request.roles, spelled, inventory=request.gpus.inventory())
        try:
            discard_all(folders)
        except BrokerError as error:
            raise ConfigError(str(error)) from error
    finished: dict[str, Summary] = {}
    for k, (name, folder) in enumerate(zip(names, folders, strict=True)):
        config = with_epochs(configs[k])
        if (earlier := finished_before(folder, config)) is not None:
            finished[name] = earlier[0]
            continue
        begun = [later for later, other in zip(names[k + 1 :], folders[k + 1 :], strict=True) if other.saved_config()]
        if begun:
            msg = (
                f"stage {name} has steps to train, but {begun[0]} has begun with the model it had; write run.name=NAME "
                f"or --fresh to train all stages again, or remove the folder {folders[names.index(begun[0])].root}"
            )
            raise ConfigError(msg)
        console.show(f"stage {k + 1} of {len(names)}: {name}")
        code = _train_run(request, console, config, as_json=False)
        if code or finished_before(folder, config) is None:
            return code
        again = [argument for argument in sys.orig_argv[1:] if argument != "--fresh"]
        os.execv(sys.executable, [sys.executable, *again])  # noqa: S606 this command, as it was given
    show_stages(console, finished, as_json=request.as_json)
    return 0


def _train_run(
    request: Request, console: Screen, config: Config, *, as_json: bool | None = None, replace_finished: bool = False
) -> int:
    """Start or resume one run; arguments as of `train`."""
    settings = [*request.settings, *([f"run.stage={config.run.stage}"] if config.run.stage else [])]
    spelled = set_by(request.path, settings)
    code, result = complete(request, console, config, spelled, replace_finished=replace_finished)
    if result is not None:
        as_json = request.as_json if as_json is None else as_json
        show(console, result, RunFolder(config.folder), as_json=as_json)
    return code


def complete(
    request: Request, console: Screen, config: Config, spelled: Mapping[str, str], *, replace_finished: bool = False
) -> tuple[int, Summary | None]:
    """Start or resume one run; return its exit code, and its result if finished.

    `spelled` are the dotted names that the file or an override sets; see `relax_actors.config.load.set_by`. With
    `replace_finished`, a finished run starts from nothing.

    Raises:
        ConfigError: as `train`.
    """
    folder = RunFolder(config.folder)
    if not replace_finished and (earlier := finished_before(folder, config)) is not None:
        console.show(earlier[1])
        return 0, earlier[0]
    roles = None if request.roles is None else list(request.roles)
    require(config, request.roles, spelled, inventory=request.gpus.inventory())
    root = Root(config, import_path_of(request.path), roles, gpus=request.gpus, fresh=request.fresh)
    for note in [*root.notes, *shortened(config)]:
        console.show(note)
    log_to_file(folder)
    watcher = Watcher(root, console, live=console.is_terminal and not request.quiet, lines=not request.quiet)
    resume = f"`{request.resume_command}` resumes the run"
    notifier = NotifierProcess(config)
    with linked(folder, console) if request.console else contextlib.nullcontext():
        failure, interrupted = run_root(root, watcher, console, resume)
        # Before anything that takes time to end: who is killed meanwhile must find the run finished.
        if failure is None and watcher.result is not None:
            save_result(folder, config, *watcher.result)
    notifier.end(outcome(failure, watcher))
    if failure is not None:
        explain(console, failure, folder, f"fix the cause; then {resume}")
        return 1, None
    if watcher.result is None:
        step = f"step {watcher.progress.step} of {config.run.steps}"
        console.show(f"stopped at {step}; {resume}")
        return (0 if interrupted and not request.must_finish else 1), None
    return 0, watcher.result[0]


def save_result(folder: RunFolder, config: Config, summary: Summary, curves: Curves) -> None:
    """Write the plot and the summary of a finished run."""
    if curves.steps:
        plot(curves, folder.reward_plot, f"{config.run.name}: {curves.figure} by step")
    write_private(folder.summary, json.dumps(summary.json(), indent=1))


@contextlib.contextmanager
def linked(folder: RunFolder, console: Screen) -> Iterator[None]:
    """Print the link of the run's web console, and keep it up if possible."""
    from relax_actors.console.activation import Activation

    try:
        activation = Activation(folder)
    except ConfigError as error:
        console.show(str(error))
        yield
        return
    console.show(f"console: {activation.link.url()}")
    activation.start()
    try:
        yield
    finally:
        activation.close()


def run_root(root: Root, watcher: Watcher, console: Screen, resume: str) -> tuple[Failure | None, bool]:
    """Run a root in this thread until it is finished, gives up, or is stopped by a signal.

    The first SIGINT, SIGTERM or SIGHUP stops the run in order, the second ends this process and all actors at once; its
    message says how to `resume`.

    Returns:
        The failure if supervision gave up, else None; and whether a signal stopped the run.
    """
    become_subreaper()
    interrupted = threading.Event()

    def on_signal(number: int, _frame: Any) -> None:
        if interrupted.is_set():
            # Children die with this process.
            _end_at_once(root, console, resume)
            os._exit(128 + number)
        interrupted.set()
        root.stop()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, on_signal)
    watcher.start()
    failure = root.run()
    watcher.halt.set()
    watcher.join(5)
    return failure or watcher.failure, interrupted.is_set()


def _end_at_once(root: Root, console: Screen, resume: str) -> None:
    """Show the cursor, and say what is left undone; safe in a signal handler."""
    saved = root.folder.last_checkpoint
    undone = "no checkpoint was written yet" if saved is None else f"steps after checkpoint {saved} will be replayed"
    text = f"killed {len(root.actors)} actors at once; {undone}; {resume}\n"
    with contextlib.suppress(OSError):
        os.write(console.file.fileno(), (f"{SHOW_CURSOR}\n{text}" if console.is_terminal else text).encode())


def log_to_file(folder: RunFolder) -> None:
    """Write the log of this process to the run's folder: the terminal shows the run."""
    path = folder.log("root")
    path.parent.mkdir(parents=True, exist_ok=True)
    logs.rotate(path)
    structlog.configure(logger_factory=structlog.WriteLoggerFactory(path.open("a", buffering=1)))


def explain(console: Screen, failure: Failure, folder: RunFolder, remedy: str) -> None:
    """Print why supervision gave up, and how to continue."""
    console.show(f"supervision gave up: {failure.role}", "bold red")
    console.show(failure.reason)
    if failure.traceback and failure.traceback != failure.reason:
        console.show(printable_lines(failure.traceback.strip(), "  "), "dim")
    log = folder.log(failure.role)
    console.show(f"its log: {log}; {remedy}" if log.exists() else remedy)


def finished_before(folder: RunFolder, config: Config) -> tuple[Summary, str] | None:
    """Return a finished run's result and a note, or None; raises ConfigError."""
    saved = folder.saved_config()
    if saved is None or not folder.summary.exists():
        return None
    old = validate(saved["config"], str(folder.config))
    summary = Summary(**json.loads(folder.summary.read_text()))
    changes = compare(old, config)
    if summary.steps < old.run.steps or continues(changes):
        return None
    shown = [change for change in changes if change.key != "run.folder"]
    if any(change.effect is not Effect.NONE for change in changes):
        removed = f"finished run in {folder.root}" if config.run.stage is None else "runs of all stages"
        msg = (
            f"run {config.run.name} is finished, with other settings:\n{listed(shown)}\nAdd run.name=NAME to train "
            f"with these settings in another folder, or --fresh to remove the {removed} and start from nothing"
        )
        raise ConfigError(msg)
    note = f"run {config.run.name} is finished already; nothing was started"
    if shown:
        note += f"; its result does not depend on the changed settings\n{listed(shown)}"
    return summary, note
