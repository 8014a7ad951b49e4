"""Commands of `relax` and sinks of `relax monitor`: built-in, and of other distributions."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from broker.address import Address
from broker.server import find_binary
from relax_actors.cli.check import resolved_settings
from relax_actors.cli.main import COMMANDS, build, run
from relax_actors.config import load_config
from relax_actors.errors import ConfigError
from relax_actors.monitoring.sinks import SINKS, LogMessage, open_sink, open_sinks
from relax_actors.runtime.run_folder import RunFolder
from tests.support.running import TINY

DEMO = Path(__file__).parents[2] / "examples" / "demo" / "demo.toml"
MODULE = """
import typer

group = typer.Typer(help="Export things.")
closed = []

def hello(name: str) -> None:
    '''Greet.'''
    typer.echo(f"hello {name}")

@group.command()
def rows() -> None:
    typer.echo("rows exported")

@group.command()
def weights() -> None:
    typer.echo("weights exported")

class Lines:
    def __init__(self, target, run):
        self.target, self.run, self.kinds = target, run, []

    def take(self, message):
        self.kinds.append(message.kind)

    def close(self):
        closed.append(self.target)

not_callable = 3
"""
ENTRY_POINTS = """
[relax_actors.commands]
hello = extra_commands:hello
export = extra_commands:group
broken = extra_commands_without_torch:run
number = extra_commands:not_callable
[relax_actors.monitors]
lines = extra_commands:Lines
broken = extra_commands:Missing
"""


def distribution(folder: Path, entry_points: str, name: str = "relax-extra") -> Path:
    """Write a distribution as pip installs it."""
    info = folder / f"{name.replace('-', '_')}-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text(entry_points)
    (folder / "extra_commands.py").write_text(MODULE)
    return folder


def relax(*arguments: str, path: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "relax_actors.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another distribution with commands and sinks, in this process too."""
    monkeypatch.syspath_prepend(str(distribution(tmp_path, ENTRY_POINTS)))
    monkeypatch.delitem(sys.modules, "extra_commands", raising=False)
    return tmp_path


def test_each_command_is_a_module_of_its_name() -> None:
    for name, path in COMMANDS.built_in.items():
        assert path == f"relax_actors.cli.{name}:{name}"
        assert COMMANDS.load(name, "command") is not None


def test_help_describes_every_command(installed: Path) -> None:
    done = relax("--help", path=installed)
    assert done.returncode == 0, done.stderr
    for name in (*COMMANDS.built_in, "hello", "export", "broken"):
        assert f" {name} " in done.stdout
    assert "Greet." in done.stdout
    assert "Export things." in done.stdout


def test_a_function_and_a_group_of_another_distribution_are_commands(installed: Path) -> None:
    assert relax("hello", "you", path=installed).stdout == "hello you\n"
    assert relax("export", "rows", path=installed).stdout == "rows exported\n"


@pytest.mark.parametrize(
    ("command", "reason"),
    [("broken", "No module named 'extra_commands_without_torch'"), ("number", "neither a function nor a typer.Typer")],
)
def test_a_command_that_cannot_be_loaded_names_the_reason(installed: Path, command: str, reason: str) -> None:
    done = relax(command, "--any", "option", path=installed)
    assert done.returncode == 2
    assert reason in done.stderr
    assert "Traceback" not in done.stderr
    if command == "broken":
        assert "relax-extra 1.5" in done.stderr
        assert "update or reinstall relax-extra, or uninstall it" in done.stderr


def test_built_in_commands_do_not_import_other_distributions(installed: Path) -> None:
    build(["status", "demo"])
    assert "extra_commands" not in sys.modules
    build(["--help"])
    assert "extra_commands" in sys.modules


def test_a_built_in_command_cannot_be_replaced(tmp_path: Path) -> None:
    path = distribution(tmp_path, "[relax_actors.commands]\nfingerprint = extra_commands:hello\n")
    done = relax("--help", path=path)
    assert done.returncode == 0
    assert "Greet." not in done.stdout
    assert "relax-extra" in done.stderr
    assert "built in" in done.stderr


def test_a_sink_of_another_distribution_receives_messages_and_is_closed(installed: Path) -> None:
    import extra_commands  # type: ignore[import-not-found]

    sink = open_sink("lines=somewhere", "demo")
    assert isinstance(sink, extra_commands.Lines)
    assert (sink.target, sink.run) == ("somewhere", "demo")
    message = LogMessage.parse("relax.demo.event.trainer.0.ready", b'{"kind": "ready"}')
    assert message is not None
    sink.take(message)
    assert sink.kinds == ["ready"]
    assert extra_commands.closed == []
    with pytest.raises(ConfigError, match="nothing"):
        open_sinks(["lines=first", "lines=second", "nothing=third"], "demo")
    assert extra_commands.closed == ["second", "first"]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("prometheus", "is no NAME=TARGET; names are prometheus, tensorboard, wandb"),
        ("prometheus=", "is no NAME=TARGET"),
        ("promotheus=9", "did you mean 'prometheus'"),
        ("prometheus=nowhere:0:0", "give a free port"),
        ("prometheus=99999", "'99999' is no port number; write prometheus=9108, or host:port"),
        ("broken=x", "update or reinstall relax-extra"),
        ("extra_commands:not_callable=x", "is not the class of a sink"),
        ("tensorboard=/dev/null/board", "tensorboard=/dev/null/board: .*; give another target"),
    ],
)
def test_an_unusable_sink_is_refused_with_the_remedy(installed: Path, setting: str, message: str) -> None:
    if setting.startswith("tensorboard"):
        pytest.importorskip("tensorboard", reason="pip install 'relax-actors[tensorboard]'")
    with pytest.raises(ConfigError, match=message):
        open_sink(setting, "demo")


def test_every_sink_has_the_constructor_of_the_protocol() -> None:
    for name in SINKS.built_in:
        factory = SINKS.load(name, "--sink")
        assert list(factory.__init__.__annotations__)[:2] == ["target", "run"]  # type: ignore[misc]


def test_version_names_relax_and_its_main_parts(tmp_path: Path) -> None:
    done = relax("--version", path=tmp_path)
    server = subprocess.run([find_binary(), "--version"], capture_output=True, text=True, timeout=10, check=True)
    expected = {"relax-actors": version("relax-actors"), "python": platform.python_version()}
    expected |= {"nats-server": server.stdout.strip().removeprefix("nats-server: v")}
    expected |= {name: version(name) for name in ("nats-py", "torch", "transformers")}
    assert done.stdout == "".join(f"{name} {found}\n" for name, found in expected.items())
    assert (done.returncode, done.stderr) == (0, "")


def test_resolved_settings_hide_passwords() -> None:
    urls = "nats://user:secret@one:4222,nats://two:4222,tls://secret@three:4222"
    settings = resolved_settings(load_config(DEMO, [f"broker.url={urls}"]))
    assert settings["broker"]["url"] == "nats://***@one:4222,nats://two:4222,tls://***@three:4222"
    assert "secret" not in json.dumps(settings)
    assert settings["run"]["name"] == "demo"


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs a command in a folder of the test, and returns the line with which it is refused."""
    monkeypatch.chdir(tmp_path)

    def call(*command: str) -> str:
        monkeypatch.setattr(sys, "argv", ["relax", *command])
        with pytest.raises(SystemExit) as ended:
            run()
        said = capsys.readouterr().err
        assert ended.value.code in (1, 2)
        assert said.count("\n") == 1, said
        return said

    return call


READERS = (["status"], ["tree"], ["ledger"], ["monitor"], ["quarantine", "list"])


@pytest.mark.parametrize("command", READERS, ids=" ".join)
def test_a_run_that_cannot_be_read_is_reported_in_one_line(command: list[str], refused: Callable[..., str]) -> None:
    folder = RunFolder(Path("runs/damaged"))
    missing = "relax: no run 'damaged': neither damaged/config.json nor runs/damaged/config.json exists"
    assert refused(*command, "damaged").startswith(missing)
    folder.root.mkdir(parents=True)
    folder.config.write_text('{"schema"')
    at = folder.root.resolve()
    assert refused(*command, "damaged").startswith(f"relax: {at}/config.json cannot be read: Expecting ':' delimiter")
    folder.save_config(load_config(TINY), "")
    never_up = f"relax: no broker address in {at}/broker.json: the run has not been up"
    assert refused(*command, "damaged").startswith(never_up)
    Address("nats://127.0.0.1:9", credentials=str(folder.broker / "keys")).save(folder.address)
    lost = f"relax: run tiny has lost {at}/broker/keys, the credentials of its broker; restore the folder\n"
    assert refused(*command, "damaged") == lost


def test_monitor_of_a_run_that_is_not_up_says_so(refused: Callable[..., str]) -> None:
    folder = RunFolder(Path("runs/tiny"))
    folder.root.mkdir(parents=True)
    folder.save_config(load_config(TINY), "")
    Address("nats://127.0.0.1:9").save(folder.address)
    said = refused("monitor", "tiny")
    remedy = "so there is nothing to watch; `relax status tiny` shows its last state"
    assert said == f"relax: run tiny is not up, {remedy}\n"
