"""Another user of the machine plants folders, links and locks where relax works; root plays that user."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker.errors import UnsafePathError
from broker.files import check_parents, make_private_folder, open_lock
from broker.schema import SCHEMA
from broker.server import Server
from deploy.install import InstallError, exclusive
from relax_actors.errors import BrokerError, ConfigError
from relax_actors.monitoring.connection import find
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.streams import store_mark
from tests.support.messages import assert_says
from tests.support.running import relax_here

ATTACKER = 1001
NODE = ("node", "--broker", "nats://127.0.0.1:1", "--role", "reward", "--store", "store", "--run", "r")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder like /tmp, where every user may create files."""
    folder = Path(tempfile.mkdtemp(prefix="relax-shared-"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def as_attacker(act: Callable[[], object]) -> None:
    """Act as another user, in a process of its own."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setgid(ATTACKER)
            os.setuid(ATTACKER)
            os.umask(0)
            act()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def refused(act: Callable[[], object], error: type[Exception] = UnsafePathError) -> str:
    with pytest.raises(error) as caught:
        act()
    return str(caught.value)


def test_new_folders_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_private_folder(tmp_path / "a" / "b")
        os.close(open_lock(tmp_path / "a" / "lock"))
    finally:
        os.umask(before)
    assert [mode(tmp_path / name) for name in ("a", "a/b", "a/lock")] == [0o700, 0o700, 0o600]
    (tmp_path / "a").chmod(0o755)
    make_private_folder(tmp_path / "a")
    assert mode(tmp_path / "a") == 0o700


@pytest.mark.parametrize("bits", [0o770, 0o707, 0o1777])
def test_folder_that_others_may_write_is_refused(tmp_path: Path, bits: int) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(bits)
    text = f"other users may write to {folder} (mode {bits:04o}); if its content is yours: chmod 700 {folder}"
    assert refused(lambda: make_private_folder(folder)) == text
    assert refused(RunFolder(folder).lock, ConfigError) == f"run folder cannot be used: {text}"
    assert refused(Server(folder).prepare, BrokerError) == f"the folder of nats-server cannot be used: {text}"
    remedy = "or set store.path to a folder that does not exist"
    for make in (True, False):
        told = refused(lambda make=make: store_mark(folder, make=make), ConfigError)
        assert told == f"the store cannot be used: {text}; {remedy}"
    assert list(folder.iterdir()) == []


def test_link_is_refused_even_if_it_leads_to_a_safe_folder(tmp_path: Path) -> None:
    (tmp_path / "safe").mkdir(mode=0o700)
    link = tmp_path / "run"
    link.symlink_to("safe")
    text = f"{link} is a link to safe; give the path of the folder itself"
    assert refused(RunFolder(link).lock, ConfigError) == f"run folder cannot be used: {text}"
    assert list((tmp_path / "safe").iterdir()) == []


def test_lock_that_is_a_link_neither_opens_nor_truncates_its_target(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "lock").symlink_to("precious")
    text = f"lock {tmp_path}/lock is a link to precious; remove the link"
    assert refused(RunFolder(tmp_path).lock, ConfigError) == f"run folder cannot be used: {text}"
    os.mkfifo(tmp_path / "0.lock")
    told = refused(lambda: open_lock(tmp_path / "0.lock"))
    assert_says(told, f"{tmp_path}/0.lock", f"user {os.geteuid()}", "remove it")
    assert (tmp_path / "precious").read_text() == "mine"


@needs_root
def test_folders_and_locks_of_another_user_are_refused(shared: Path) -> None:
    run, lock = shared / "run", shared / "0.lock"
    as_attacker(lambda: (run.mkdir(0o755), lock.touch(0o666)))
    text = f"{run} belongs to user {ATTACKER}, and this is user 0; give another path"
    assert refused(RunFolder(run).lock, ConfigError) == f"run folder cannot be used: {text}"
    assert refused(lambda: store_mark(run), ConfigError).startswith(f"the store cannot be used: {text}; or set ")
    # Where the kernel protects sticky folders (fs.protected_regular), it refuses the file itself.
    with pytest.raises((UnsafePathError, PermissionError)):
        open_lock(lock)


@needs_root
@pytest.mark.parametrize(
    "command",
    [
        "status RUN",
        "ledger RUN",
        "tree RUN",
        "doctor RUN",
        "quarantine list RUN",
        "monitor RUN",
        "tail relax.demo.> --run RUN",
        "scale RUN reward=2",
        "chaos RUN --kill reward/0",
    ],
)
def test_run_of_another_user_is_neither_read_nor_imported(shared: Path, tmp_path: Path, command: str) -> None:
    """Its settings name code that the reader would import."""
    run, planted = shared / "run", shared / "imported"
    code = f"from pathlib import Path\nPath({str(planted)!r}).touch()\n"
    settings = {"reward": {"function": "evil.reward"}}

    def plant() -> None:
        run.mkdir(0o755)
        (run / "evil.py").write_text(code)
        (run / "config.json").write_text(json.dumps({"schema": SCHEMA, "import_path": str(run), "config": settings}))

    as_attacker(plant)
    done = relax_here(*command.replace("RUN", str(run)).split(), cwd=tmp_path)
    assert done.returncode == 2, done
    for word in ("run folder", str(run), f"belongs to user {ATTACKER}", "this is user 0", "as the user of the run"):
        assert word in done.stderr, done.stderr
    assert not planted.exists()


@needs_root
def test_another_user_reading_a_run_learns_whose_it_is(shared: Path) -> None:
    run = RunFolder(shared / "run")
    run.lock().close()
    run.config.write_text("{}")

    def attack() -> None:
        with pytest.raises(ConfigError, match=r"user 0, .*user 1001"):
            find(str(run.root))

    as_attacker(attack)


@needs_root
def test_another_user_can_neither_enter_a_run_nor_hold_its_lock(shared: Path) -> None:
    run = RunFolder(shared / "run")
    run.lock().close()

    def attack() -> None:
        for path in (run.root, run.root / "lock"):
            with pytest.raises(PermissionError):
                os.open(path, os.O_RDONLY)

    as_attacker(attack)


@needs_root
def test_another_user_cannot_hold_the_lock_of_an_installation(shared: Path) -> None:
    venv = shared / "venv"
    with exclusive(venv):
        pass

    def attack() -> None:
        with pytest.raises(PermissionError):
            fcntl.flock(os.open(f"{venv}.lock", os.O_RDONLY), fcntl.LOCK_EX)

    as_attacker(attack)
    other = shared / "other"
    as_attacker(Path(f"{other}.lock").touch)
    text = refused(exclusive(other).__enter__, InstallError)
    assert text.startswith(f"{other}.lock ")
    assert text.endswith("name another folder: make VENV=FOLDER")


@needs_root
def test_work_folder_below_a_folder_of_another_user_is_refused(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack on `relax node` without --work: modules in a planted folder would be imported."""
    cache = shared / "cache"
    as_attacker(lambda: (cache / "relax" / "nodes").mkdir(parents=True))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    done = relax_here(*NODE, "--name", "n", cwd=shared)
    assert (done.returncode, done.stdout) == (2, "")
    assert_says(done.stderr, f"{cache}/relax/nodes/r.n", f"user {ATTACKER}", "--work FOLDER")


def test_parents_that_others_may_write_are_refused_and_sticky_ones_are_not(tmp_path: Path) -> None:
    check_parents(tmp_path / "new" / "newer")
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    text = refused(lambda: check_parents(open_to_all / "run"))
    why = "can be written by other users (mode 0777), who could put another folder in its place"
    assert text == f"{open_to_all}/run is not safe: {open_to_all} {why}"
    (tmp_path / "link").symlink_to(open_to_all)
    assert f"{open_to_all} can be written" in refused(lambda: check_parents(tmp_path / "link" / "run"))


@pytest.mark.parametrize("name", ["../other", "a b", "x" * 65, ""])
def test_node_names_are_checked_like_run_names(tmp_path: Path, name: str) -> None:
    done = relax_here(*NODE, "--name", name, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert_says(done.stderr, "--name", repr(name), "letters, digits")
