"""`relax keys` writes to private folders, and replaces nothing that is not its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from broker.errors import BrokerError
from broker.keyed_server import KeyedServer
from broker.listeners import Settings
from broker.server_keys import Users, secret_of, write_keys
from relax_actors.cli.keys import make_keys, remove_run
from relax_actors.errors import ConfigError
from tests.support.messages import assert_says
from tests.support.running import TINY, relax, wait_until


def error_of(folder: Path, *settings: str) -> str:
    with pytest.raises(ConfigError) as refused:
        make_keys(str(TINY), folder, list(settings), Settings())
    return str(refused.value)


def test_every_folder_is_private(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.mkdir(mode=0o755)
    make_keys(str(TINY), keys, [], Settings(tls=True, mutual=True, cluster=("a", "b")))
    modes = {path: path.stat().st_mode & 0o777 for path in (keys, *keys.rglob("*"))}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    secret = ("nats.creds", "keys.json", "key.pem", "ca-key.pem", "route.json", "nats-server.conf", "a.conf")
    assert {mode for path, mode in modes.items() if path.name in secret} == {0o600}


def test_credentials_of_a_removed_run_are_revoked_in_a_later_one_of_the_same_second(tmp_path: Path) -> None:
    keys, other, name = KeyedServer(tmp_path / "keys"), tmp_path / "other", ["run.name=again"]
    make_keys(str(TINY), keys.folder, ["run.name=first"], Settings())
    issued = 0
    for _ in range(3):
        make_keys(str(TINY), other, name, Settings(server=keys.folder))
        revoked = keys.runs["again"].revoked
        assert revoked >= issued
        issued = revoked + 1
        remove_run("again", other, Settings(server=keys.folder))
    (keys.private / "removed.json").write_text("[]")
    with pytest.raises(ConfigError) as refused:
        make_keys(str(TINY), other, name, Settings(server=keys.folder))
    assert_says(refused.value, f"{keys.private}/removed.json cannot be read", "restore it", "valid again")


def test_unreadable_signing_keys_of_an_embedded_broker_name_the_remedy(tmp_path: Path) -> None:
    users = Users.operator("tiny")
    write_keys(tmp_path, users)
    secret_of(tmp_path).write_text("")
    with pytest.raises(BrokerError) as refused:
        write_keys(tmp_path, users)
    assert_says(refused.value, f"{tmp_path}/private/keys.json does not hold operator keys", "restore it", "--fresh")


def test_folder_with_other_content_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    assert_says(error_of(tmp_path), str(tmp_path), "`relax keys`", "thesis.tex", "empty folder")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_empty_folders_of_roles_that_the_run_lacks_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "reference").mkdir()
    make_keys(str(TINY), tmp_path, [], Settings())
    assert not any((tmp_path / "reference").iterdir())


def test_credentials_of_another_run_are_replaced_on_request_only(tmp_path: Path) -> None:
    first = ["run.name=first"]
    make_keys(str(TINY), tmp_path, first, Settings())
    before = (tmp_path / "rollout" / "nats.creds").read_text()
    refusal = error_of(tmp_path, "run.name=second")
    assert_says(refusal, f"{tmp_path} holds the credentials of run 'first'", f"--server {tmp_path}", "--replace")
    assert (tmp_path / "rollout" / "nats.creds").read_text() == before
    make_keys(str(TINY), tmp_path, first, Settings())
    make_keys(str(TINY), tmp_path, ["run.name=second"], Settings(replace=True))


def test_credentials_whose_signing_keys_are_elsewhere_are_not_replaced(tmp_path: Path) -> None:
    """Their server would refuse new ones: `--server` was forgotten, or the signing keys are kept in a safe place."""
    keys, other = tmp_path / "keys", tmp_path / "other"
    make_keys(str(TINY), keys, ["run.name=first"], Settings())
    second = ["run.name=second"]
    make_keys(str(TINY), other, second, Settings(server=keys))
    before = (other / "rollout" / "nats.creds").read_text()
    assert_says(error_of(other, *second), f"{other}/private/keys.json", "missing", "--server", "restore", "--replace")
    assert (other / "rollout" / "nats.creds").read_text() == before
    make_keys(str(TINY), other, second, Settings(replace=True))


def test_server_keeps_its_options_when_its_keys_are_rotated_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = Settings(tls=True, mutual=True, hosts=("a",), listen="0.0.0.0:4333", store=Path("store"), http=8222)
    made = make_keys(str(TINY), tmp_path / "keys", [], options)
    config = (tmp_path / "keys" / "server" / "nats-server.conf").read_text()
    monkeypatch.chdir(tmp_path / "keys")
    rotated = make_keys(str(TINY), tmp_path / "keys", [], Settings(rotate=True))
    assert (tmp_path / "keys" / "server" / "nats-server.conf").read_text() == config
    assert {name: (tmp_path / "keys" / "rollout" / name).exists() for name in ("ca.pem", "key.pem")} == {
        "ca.pem": True,
        "key.pem": True,
    }
    assert set(made) <= set(rotated)
    make_keys(str(TINY), tmp_path / "keys", [], Settings(listen="127.0.0.1:4333"))
    assert "tls {" not in (tmp_path / "keys" / "server" / "nats-server.conf").read_text()


def test_two_commands_change_a_server_one_after_the_other(tmp_path: Path) -> None:
    """Each writes the accounts of all runs, so the later of two at once would leave out the run of the other."""
    keys = tmp_path / "keys"
    make_keys(str(TINY), keys, ["run.name=first"], Settings())
    code = [
        sys.executable,
        "-m",
        "relax_actors.cli.main",
        "keys",
        str(TINY),
        str(tmp_path / "second"),
        "run.name=second",
    ]
    with KeyedServer(keys).lock():
        process = subprocess.Popen([*code, "--server", str(keys)], stdout=subprocess.DEVNULL)
        waits = f"-> FLOCK  ADVISORY  WRITE {process.pid} "
        wait_until(lambda: waits in Path("/proc/locks").read_text(), "wait for the lock")
        assert list(KeyedServer(keys).runs) == ["first"]
    assert process.wait(30) == 0
    assert list(KeyedServer(keys).runs) == ["first", "second"]


def test_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").touch()
    assert_says(error_of(tmp_path / "keys"), f"{tmp_path}/keys", "not a folder")


def test_path_that_cannot_be_created_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = relax("keys", str(TINY), f"{tmp_path}/file/keys", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert_says(done.stderr, f"{tmp_path}/file/keys: Not a directory", f"user {os.geteuid()} owns", "mount a volume")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    make_keys(str(TINY), tmp_path, [], Settings())
    os.chown(tmp_path / "rollout", 1001, 1001)
    assert_says(error_of(tmp_path), f"{tmp_path}/rollout belongs to user 1001", "user 0", "another path")
