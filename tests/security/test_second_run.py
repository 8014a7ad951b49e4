"""Several runs on one server: `relax keys --server` admits, rotates and removes one, and the others stay."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from broker.connection import Connection
from broker.errors import BrokerError
from broker.listeners import Settings
from broker.permissions import OPERATOR
from broker.streams import ensure_streams, table_spec
from broker.subjects import Subjects
from relax_actors.cli.keys import make_keys, remove_run
from relax_actors.config import load_config
from relax_actors.errors import ConfigError
from relax_actors.roles import table_kinds
from relax_actors.supervision.streams import ensure_run_streams
from tests.support.guarded import Guarded, MakeGuarded
from tests.support.messages import assert_says
from tests.support.running import TINY, Run, relax, wait_until

FIRST, SECOND = "first", "second"
OF_SECOND = [f"run.name={SECOND}"]


@pytest.fixture
def guarded(make_guarded: MakeGuarded) -> Guarded:
    """A server with the credentials of one run, which is up."""
    found = make_guarded([f"run.name={FIRST}"])
    found.make()
    found.start()
    return found


def second(guarded: Guarded) -> Path:
    """Folder of the credentials of the second run."""
    return guarded.keys.with_name(SECOND)


def is_admitted(guarded: Guarded, user: str, keys: Path) -> bool:
    try:
        Connection(guarded.address(user, keys), user, 2.0).close()
    except BrokerError as error:
        if "refuses these credentials" in str(error):
            return False
        raise
    return True


@pytest.mark.slow
def test_second_run_is_admitted_rotated_and_removed_without_a_trace_in_the_first(guarded: Guarded) -> None:
    keys = second(guarded)
    with closing(Connection(guarded.address("rollout"), "rollout")) as living:
        guarded.admit(keys, OF_SECOND)
        wait_until(lambda: is_admitted(guarded, OPERATOR, keys), "the second run")
        with closing(Connection(guarded.address(OPERATOR, keys), OPERATOR)) as operator:
            operator.call(ensure_run_streams(operator, load_config(TINY, OF_SECOND)), 30)
        stolen = shutil.copytree(keys, keys.with_name("stolen"))
        guarded.admit(keys, OF_SECOND, Settings(rotate=True))
        wait_until(lambda: not is_admitted(guarded, "trainer", stolen), "refusal of the stolen credentials")
        assert is_admitted(guarded, "trainer", keys)
        stolen = shutil.copytree(keys, keys.with_name("stolen2"))
        remove_run(SECOND, keys, Settings(server=guarded.keys))
        guarded.reload()
        wait_until(lambda: not is_admitted(guarded, OPERATOR, stolen), "refusal of a run that was removed")
        assert not list(keys.glob("*/nats.creds"))
        guarded.admit(keys, OF_SECOND)
        wait_until(lambda: is_admitted(guarded, OPERATOR, keys), "the second run again")
        assert not is_admitted(guarded, OPERATOR, stolen)
        assert living.nc.is_connected
        assert living.nc.stats["reconnects"] == 0


def test_a_run_cannot_reserve_the_disk_of_another(guarded: Guarded) -> None:
    """The account's quota is that of the run's settings, which its operator cannot raise."""
    config = load_config(TINY, guarded.settings)
    subjects = Subjects(FIRST)
    with closing(Connection(guarded.address(OPERATOR), OPERATOR)) as operator:
        operator.call(ensure_run_streams(operator, config), 30)
        greedy = table_spec(subjects, table_kinds(), 4 * config.broker.max_bytes)
        with pytest.raises(BrokerError) as refused:
            operator.call(ensure_streams(operator, [greedy]), 30)
    assert_says(
        refused.value,
        guarded.url,
        subjects.table_stream,
        "insufficient storage",
        "broker.max_bytes",
        "relax keys",
    )


def test_second_run_has_the_tls_of_its_server(make_guarded: MakeGuarded) -> None:
    guarded = make_guarded([f"run.name={FIRST}"])
    guarded.make(Settings(tls=True, mutual=True))
    guarded.start()
    guarded.admit(second(guarded), OF_SECOND)
    wait_until(lambda: is_admitted(guarded, "rollout", second(guarded)), "the second run")


def test_what_is_done_is_told(tmp_path: Path) -> None:
    keys, other = tmp_path / "keys", tmp_path / "second"
    make_keys(str(TINY), keys, [f"run.name={FIRST}"], Settings())
    users = "reward, advantages, prompts, rollout, trainer, node, operator, observer"
    apply = f"to apply: have each server reload {keys}/server/auth.conf, kill -HUP PID; connections of others stay"
    assert make_keys(str(TINY), other, OF_SECOND, Settings(server=keys)) == [
        f"credentials of {users}: {other}/<user>/nats.creds",
        apply,
        f"the run: relax up {TINY} broker.url=nats://127.0.0.1:4222 broker.credentials={other}",
        "other runs of the server: first",
    ]
    done = relax("keys", SECOND, str(other), "--server", str(keys), "--remove", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    removed, reload, kept = done.stdout.splitlines()
    assert_says(removed, "run second", keys, other)
    assert reload == apply
    assert kept.startswith("its streams are kept: to free their space, remove the folder jetstream/A")


def test_a_folder_for_two_runs_is_refused_with_the_remedy(tmp_path: Path) -> None:
    keys, other = tmp_path / "keys", tmp_path / "other"

    def error_of(act: Callable[[], object]) -> str:
        with pytest.raises(ConfigError) as refused:
            act()
        return str(refused.value)

    add = partial(make_keys, str(TINY), other, OF_SECOND)
    assert_says(error_of(lambda: add(Settings(server=keys))), f"{keys}/private/keys.json", "missing", "relax keys")
    make_keys(str(TINY), keys, [f"run.name={FIRST}"], Settings())
    assert_says(
        error_of(lambda: make_keys(str(TINY), keys, OF_SECOND, Settings())),
        keys,
        "run 'first'",
        "--server",
        "--replace",
    )
    assert_says(error_of(lambda: add(Settings(server=keys, websocket=8443))), "--websocket", keys, "without --server")
    assert_says(error_of(lambda: remove_run(SECOND, other, Settings(server=keys))), keys, "no run 'second'", "first")
    (keys / "private" / "runs" / "first.json").write_text("{}")
    with pytest.raises(BrokerError) as unreadable:
        add(Settings(server=keys))
    assert_says(unreadable.value, f"{keys}/private/runs/first.json", "'users'", "relax keys")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_runs_train_on_one_server_while_one_is_rotated(guarded: Guarded, make_run: Callable[..., Run]) -> None:
    guarded.admit(second(guarded), OF_SECOND)
    wait_until(lambda: is_admitted(guarded, OPERATOR, second(guarded)), "the second run")
    url = f"broker.url={guarded.url}"
    first = make_run(FIRST, "run.steps=20", url, f"broker.credentials={guarded.keys}").start()
    other = make_run(SECOND, "run.steps=20", url, f"broker.credentials={second(guarded)}").start()
    wait_until(partial(other.table.get, f"relax.{SECOND}.batch.3"), "batch.3", 120)
    guarded.admit(second(guarded), OF_SECOND, Settings(rotate=True))
    for run in (first, other):
        code, result, said = run.finish()
        assert code == 0, said
        assert (result["admitted"], result["trained"]) == (80, 80)
    assert "credentials_revoked" not in "".join(path.read_text() for path in (first.folder.root / "logs").glob("*"))
