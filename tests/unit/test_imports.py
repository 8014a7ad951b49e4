"""Importing the engine is cheap: what trains nothing imports neither torch nor transformers."""

from __future__ import annotations

import ast
import importlib.util
import json
import resource
import subprocess
import sys
import sysconfig
from contextlib import closing
from pathlib import Path
from types import ModuleType

import pytest

import broker
import relax_actors
import relax_actors.runtime
from broker.connection import Connection
from broker.server import Server
from broker.server_keys import Users
from relax_actors.config import load_config
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.streams import ensure_run_streams
from tests.support.running import TINY

PICKLING = {
    "pickle",
    "cloudpickle",
    "dill",
    "shelve",
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
}
HEAVY = ("torch", "transformers", "reasoning_gym", "pyarrow", "matplotlib", "cv2", "av", "torchaudio")
ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "demo" / "demo.toml"
RELAX = Path(sysconfig.get_path("scripts")) / "relax"


def heavy_after(script: str, heavy: tuple[str, ...] = HEAVY, cwd: Path | None = None) -> list[str]:
    code = f"{script}\nimport sys, json\nprint(json.dumps([m for m in {heavy!r} if m in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, cwd=cwd
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


WITHOUT_TORCH = (
    "relax_actors",
    "relax_actors.cli.main",
    "relax_actors.cli.check",
    "relax_actors.cli.up",
    "relax_actors.cli.simulate",
    "relax_actors.cli.tail",
    "relax_actors.media",
    "relax_actors.roles",
    "relax_actors.roles.prompts",
    "relax_actors.roles.reward",
    "relax_actors.roles.advantages",
    "relax_actors.roles.evaluator",
    "relax_actors.roles.trainer",
    "relax_actors.roles.rollout",
    "relax_actors.supervision.actor_process",
    "relax_actors.supervision.node",
    "relax_actors.supervision.root",
)


def test_modules_import_without_torch() -> None:
    script = (
        "import importlib, sys\n"
        f"for name in {WITHOUT_TORCH!r}:\n"
        "    importlib.import_module(name)\n"
        f"    assert not (loaded := [other for other in {HEAVY!r} if other in sys.modules]), (name, loaded)"
    )
    assert heavy_after(script) == []


def test_the_public_names_are_there_without_torch() -> None:
    assert (
        heavy_after(f"from relax_actors import {', '.join(set(relax_actors.__all__) - {'PolicyInputs', 'PolicyLoss'})}")
        == []
    )


def test_the_package_alone_imports_next_to_nothing_and_installs_no_import_hook() -> None:
    script = "import sys\nfinders = list(sys.meta_path)\nimport relax_actors\nassert sys.meta_path == finders"
    assert heavy_after(script, (*HEAVY, "numpy", "nats", "pydantic")) == []


@pytest.mark.parametrize("package", [broker, relax_actors, relax_actors.runtime])
def test_every_public_name_resolves(package: ModuleType) -> None:
    assert [name for name in package.__all__ if not hasattr(package, name)] == []


@pytest.mark.parametrize("file", sorted((ROOT / "examples").rglob("*.py")), ids=lambda file: file.name)
def test_an_example_imports_from_at_most_three_places(file: Path) -> None:
    imports = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
    places = {node.module for node in imports if node.module and node.module.startswith(("broker", "relax_actors"))}
    assert len(places) <= 3


def test_facts_of_all_algorithm_functions_are_there_without_torch() -> None:
    script = (
        "from relax_actors.registry.catalog import ADVANTAGES, POLICY_LOSSES\n"
        "for registry in (ADVANTAGES, POLICY_LOSSES):\n"
        "    assert len(registry.built_in) >= 10\n"
        "    for name in registry.built_in: assert registry.load(name, '').spec.formula, name\n"
        "from relax_actors.algorithms import formulas, function_check, refusals"
    )
    assert heavy_after(script) == []


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Rolle'"):
        relax_actors.Rolle  # noqa: B018


def cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.skipif(not RELAX.exists(), reason=f"the package is not installed: there is no {RELAX}")
@pytest.mark.parametrize("arguments", [["--help"], ["up", "--help"], ["check", "--help"], ["status", "--help"]])
def test_help_comes_at_once(arguments: list[str]) -> None:
    took = []
    for _ in range(3):
        began = cpu_of_children()
        done = subprocess.run([str(RELAX), *arguments], capture_output=True, text=True, timeout=60, check=False)
        took.append(cpu_of_children() - began)
        assert done.returncode == 0, done.stderr
        assert "Usage: relax" in done.stdout
    assert min(took) < 1.2  # seconds of CPU: others may use the machine


def test_help_imports_no_torch() -> None:
    assert (
        heavy_after(
            "import sys; sys.argv = ['relax', '--help']\nfrom relax_actors.cli.main import run\n"
            "try: run()\nexcept SystemExit: pass"
        )
        == []
    )


def run_command(*arguments: str) -> str:
    return (
        f"import sys; sys.argv = {['relax', *arguments]!r}\nfrom relax_actors.cli.main import run\n"
        "try: run()\nexcept SystemExit as end: assert not end.code, end.code"
    )


@pytest.fixture
def recorded_run(tmp_path: Path) -> Path:
    """Folder of a run that is not up and has trained nothing."""
    config = load_config(TINY, ["run.name=recorded", f"run.folder={tmp_path / 'recorded'}"])
    folder = RunFolder(config.folder)
    folder.root.mkdir()
    folder.save_config(config, str(TINY.parent))
    server = Server(folder.broker, users=Users.operator("recorded"))
    address = server.start()
    try:
        with closing(Connection(address, "test")) as connection:
            connection.call(ensure_run_streams(connection, config), 30)
    finally:
        server.stop()
    address.save(folder.address)
    return folder.root


@pytest.mark.parametrize("command", ["status", "tree", "ledger"])
def test_a_command_that_reads_a_run_imports_no_engine(command: str, recorded_run: Path) -> None:
    others = ("aiohttp", "rich.traceback", "safetensors", "cryptography", "tokenizers", "pydantic")
    own = ("cli.check", "config.schema", "engines", "media", "roles", "supervision")
    heavy = (*HEAVY, *others, *(f"relax_actors.{name}" for name in own))
    assert heavy_after(run_command(command, str(recorded_run)), heavy) == []


@pytest.mark.parametrize(("package", "skipping"), [("rich", "structlog.dev"), ("aiohttp", "nats.aio.transport")])
def test_a_package_that_is_skipped_for_a_library_can_be_imported_by_others(package: str, skipping: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    script = (
        f"from broker.lean_imports import skip_optional_imports\nskip_optional_imports()\nimport {skipping}, sys\n"
        f"assert {package!r} not in sys.modules\nimport {package}"
    )
    assert heavy_after(script, (package,)) == [package]


@pytest.mark.parametrize("module", ["relax_actors.supervision.node", "relax_actors.supervision.recorder"])
def test_a_supervisors_process_skips_optional_packages(module: str, tmp_path: Path) -> None:
    script = (
        "import sys\nfrom contextlib import suppress\nfrom relax_actors.supervision.lean_process import main\n"
        f"sys.argv[1:] = [{module!r}, {str(tmp_path / 'no run')!r}]\nwith suppress(OSError, SystemExit):\n    main()"
    )
    assert heavy_after(script, (module, *HEAVY, "rich", "aiohttp")) == [module]


def test_check_imports_neither_an_engine_nor_the_broker_client(tmp_path: Path) -> None:
    heavy = (*HEAVY, "nats", "structlog", "rich.console", "cryptography")
    assert heavy_after(run_command("check", str(DEMO)), heavy, cwd=tmp_path) == []


@pytest.mark.slow
def test_nothing_of_ours_reads_a_pickle() -> None:
    """Pickles run what they hold; among others torch's collectives of objects and its own files are pickles.

    One is written: SGLang takes tensors in a request in no other way. One collective is named, to replace it.
    """
    folders = [Path(__file__).parents[2] / name for name in ("relax_actors", "broker")]
    for path in (path for folder in folders for path in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.attr] if isinstance(node, ast.Attribute) else []
            if isinstance(node, ast.Import | ast.ImportFrom):
                names += [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            allowed = {
                ("sglang", "weight_loaders.py"): {"pickle"},
                ("mcore", "process_groups.py"): {"all_gather_object"},
            }.get(path.parts[-2:], set())
            assert not (PICKLING & set(names)) - allowed, f"{path}:{node.lineno}"
            if isinstance(node, ast.Attribute) and node.attr in ("load", "loads", "save", "Unpickler"):
                assert ast.unparse(node.value) not in ("torch", "pickle"), f"{path}:{node.lineno}"
