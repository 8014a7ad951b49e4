"""Sessions of environments on a real server: the role, its sessions' processes, and the client of a rollout."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from relax_actors.envs.client import EnvironmentClient
from relax_actors.envs.operations import Close, Operation
from relax_actors.messages import Act, EnvironmentAnswer, Open
from relax_actors.roles.environment import EnvironmentRole
from relax_actors.runtime import Context
from relax_actors.runtime.service_role import ServicePump
from tests.support.contexts import MakeContext
from tests.support.messages import assert_says

LEASE = {"pid": 1, "since": 1.0, "rows": [], "waits_for": None, "doing_since": None}
SUPPORT = "tests.support.environments"


class Pool:
    """Actors of the role in this process, with leases."""

    def __init__(self, make_context: MakeContext, *settings: str) -> None:
        self._make, self.settings = make_context, settings
        self.roles: dict[int, EnvironmentRole] = {}

    def start(self, n: int, incarnation: int = 1) -> EnvironmentRole:
        role = EnvironmentRole()
        role.context = context = self._make("environment", *self.settings, incarnation=incarnation)
        context.n = n
        role.setup()

        async def start() -> None:
            ServicePump(role)
            await role.start()
            await context.state.renew_lease("environment", n, LEASE | {"incarnation": incarnation}, 60)

        context.table.connection.call(start(), 20)
        self.roles[n] = role
        return role

    def stop(self, n: int, *, release: bool = True) -> None:
        role = self.roles.pop(n)
        role.context.table.connection.call(role.stop(), 20)
        role.close()
        if release:
            role.context.table.connection.call(role.context.state.release_lease("environment", n), 20)


@pytest.fixture
def make_pool(make_context: MakeContext) -> Iterator[Callable[..., Pool]]:
    pools: list[Pool] = []

    def make(environment: str, *settings: str, actors: int = 1) -> Pool:
        pool = Pool(make_context, f"environment.name={SUPPORT}.{environment}", *settings)
        pools.append(pool)
        for n in range(actors):
            pool.start(n)
        return pool

    yield make
    for pool in pools:
        for n in list(pool.roles):
            pool.stop(n)


@pytest.fixture
def make_client(make_context: MakeContext) -> Iterator[Callable[[Pool], EnvironmentClient]]:
    clients: list[EnvironmentClient] = []

    def make(pool: Pool) -> EnvironmentClient:
        context: Context = make_context("rollout", *pool.settings)
        clients.append(EnvironmentClient(context))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def ask(
    client: EnvironmentClient, operations: Sequence[Operation], seconds: float = 30
) -> dict[str, EnvironmentAnswer]:
    """Submit operations and wait for all of their answers, by session."""
    client.submit(operations)
    wanted = {operation.session for operation in operations if not isinstance(operation, Close)}
    return wait(client, wanted, seconds)


def wait(client: EnvironmentClient, wanted: set[str], seconds: float = 30) -> dict[str, EnvironmentAnswer]:
    found: dict[str, EnvironmentAnswer] = {}
    deadline = time.monotonic() + seconds
    while wanted - found.keys():
        assert time.monotonic() < deadline, f"no answer for {wanted - found.keys()}"
        found |= {answer.session: answer for answer in client.take(0.2)}
    return found


def test_episodes_are_played_over_several_actors(make_pool: Callable[..., Pool], make_client: Callable) -> None:
    pool = make_pool("GuessNumber", "environment.options.limit=3", actors=2)
    client = make_client(pool)
    names = {f"s{i}" for i in range(8)}
    opened = ask(client, [Open(name, {}, seed) for seed, name in enumerate(sorted(names))])
    assert {answer.messages[0]["content"] for answer in opened.values()} == {"?"}
    assert {answer.turn for answer in opened.values()} == {-1}
    counts = [role.metrics()["environment_sessions"] for role in pool.roles.values()]
    assert sum(counts) == 8
    assert min(counts) > 0, "rendezvous hashing spreads the sessions"
    playing, rewards = set(names), {}
    for guess in range(4):
        answers = ask(client, [Act(name, guess, str(guess)) for name in playing])
        rewards |= {name: answer.reward for name, answer in answers.items() if answer.done}
        playing -= rewards.keys()
    assert not playing
    assert set(rewards.values()) == {1.0}


@pytest.mark.slow
def test_hung_session_costs_only_itself(make_pool: Callable[..., Pool], make_client: Callable) -> None:
    pool = make_pool("Misbehaving", "environment.step_seconds=5")
    client = make_client(pool)
    ask(client, [Open("good", {}, 0), Open("bad", {}, 0)])
    client.submit([Act("bad", 0, "spin"), Act("good", 0, "")])
    first = wait(client, {"good"})
    assert first["good"].messages == [{"role": "user", "content": "ok"}]
    assert "bad" not in first
    (answer,) = wait(client, {"bad"}).values()
    assert (answer.error, answer.detail) == ("environment", "no answer within environment.step_seconds = 5")
    assert not ask(client, [Act("good", 1, "")])["good"].error


@pytest.mark.slow
def test_sessions_of_a_killed_actor_are_replayed_elsewhere(
    make_pool: Callable[..., Pool], make_client: Callable
) -> None:
    pool = make_pool("GuessNumber", "environment.options.limit=1000", actors=1)
    client = make_client(pool)
    ask(client, [Open("s", {}, 5)])
    first = [ask(client, [Act("s", turn, action)])["s"] for turn, action in enumerate(("10", "999"))]
    pool.start(1)
    pool.stop(0)
    lost = ask(client, [Act("s", 2, "500")])["s"]
    assert lost.error == "lost"
    digests = [answer.digest for answer in first]
    again = ask(client, [Open("s", {}, 5, None, ["10", "999"], digests)])["s"]
    assert (again.turn, again.messages, again.error) == (1, first[1].messages, "")
    assert not ask(client, [Act("s", 2, "500")])["s"].error


def test_new_incarnation_does_not_know_the_sessions(make_pool: Callable[..., Pool], make_client: Callable) -> None:
    pool = make_pool("Echo")
    client = make_client(pool)
    ask(client, [Open("s", {}, 0)])
    pool.stop(0, release=False)
    pool.start(0, incarnation=2)
    answer = ask(client, [Act("s", 0, "a")])["s"]
    assert (answer.error, answer.turn) == ("lost", 0)
    assert not ask(client, [Open("s", {}, 0, None, ["a"])])["s"].error


def test_different_replay_is_reported(make_pool: Callable[..., Pool], make_client: Callable) -> None:
    client = make_client(make_pool("Random"))
    ask(client, [Open("s", {}, 0)])
    recorded = ask(client, [Act("s", 0, "a")])["s"]
    answer = ask(client, [Open("s", {}, 0, None, ["a"], [recorded.digest])])["s"]
    assert answer.error == "replay"
    assert answer.detail.startswith("turn 0 of the replay gave another answer than recorded: ")


def test_full_actor_sends_sessions_to_another(make_pool: Callable[..., Pool], make_client: Callable) -> None:
    pool = make_pool("Echo", "environment.sessions=4", actors=2)
    client = make_client(pool)
    assert not any(answer.error for answer in ask(client, [Open(f"s{i}", {}, 0) for i in range(8)]).values())
    assert [role.metrics()["environment_sessions"] for role in pool.roles.values()] == [4, 4]
    client.submit([Open("ninth", {}, 0)])
    assert client.take(0.5) == []
    client.submit([Close("s0")])
    assert not wait(client, {"ninth"})["ninth"].error


def test_too_long_action_is_refused(make_pool: Callable[..., Pool], make_client: Callable) -> None:
    client = make_client(make_pool("Echo"))
    ask(client, [Open("s", {}, 0), Open("t", {}, 0)])
    answers = ask(client, [Act("s", 0, "x" * (5 << 20)), Act("t", 0, "y")])
    assert not answers["t"].error
    assert answers["s"].error == "environment"
    assert_says(answers["s"].detail, "5242880", "1048576", "lower rollout.max_tokens")
