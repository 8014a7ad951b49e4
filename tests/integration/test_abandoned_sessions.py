"""Sessions that agents take over HTTP and abandon: nothing of them stays in gateway and rollout."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from nats.aio.subscription import Subscription

from broker.table import Table
from relax_actors.generation.batch import Ticket
from relax_actors.messages import Turn
from relax_actors.messages.generate import GenerateCall
from relax_actors.roles.agent_rollout import AgentRollout
from relax_actors.roles.gateway import GatewayRole
from relax_actors.serving.live import LiveStream
from relax_actors.sessions.call_watch import CallWatch
from relax_actors.sessions.forest import Forest
from relax_actors.sessions.session_book import Session
from relax_actors.sessions.session_log import LogWriter
from tests.support.policy_ends import USER, PolicyEnds
from tests.support.running import wait_until

ROWS, SAMPLES, TOGETHER, AGENTS = 20, 50, 4, 40
SETTINGS = (
    f"rollout.group_size={SAMPLES}",
    f"rollout.max_concurrent_prompts={TOGETHER}",
    "reward.function=environment",
    "agent.retries=0",
    "gateway.max_concurrent=1000",
)
KEPT = (Session, Forest, Turn, LogWriter, CallWatch, Ticket, GenerateCall, LiveStream, Subscription, asyncio.Task)
"""Types of what a session needs."""


def living() -> Counter[str]:
    """Count the objects of `KEPT`."""
    gc.collect()
    return Counter(type(one).__name__ for one in gc.get_objects() if isinstance(one, KEPT))


@pytest.fixture
def ends(table: Table, tmp_path: Path) -> Iterator[PolicyEnds]:
    found = PolicyEnds(table, tmp_path, AgentRollout, *SETTINGS)
    yield found
    found.close()


@pytest.fixture
def gateway(ends: PolicyEnds, table: Table) -> Iterator[tuple[str, str]]:
    """URL and token of a gateway."""
    role = GatewayRole()
    role.context = ends.context("gateway")
    role.setup()
    table.connection.call(role.start(), 20)
    folder = role.context.config.folder / "gateway"
    yield (folder / "url.0").read_text(), (folder / "token").read_text()
    table.connection.call(role.stop(), 20)


async def work(client: httpx.AsyncClient, number: int) -> bool:
    """Take a sample, and end it or abandon it: at once, in mid-answer or after an answer. Return whether it ended."""
    way = ("ended", "silent", "ended", "in mid-answer", "ended", "after an answer")[number % 6]
    lease = {"lease_seconds": 60 if way == "ended" else 1}
    while (taken := await client.post("/sessions", json=lease)).status_code == 204:  # noqa: ASYNC110 polls
        await asyncio.sleep(0.3)
    session = taken.raise_for_status().json()
    url, head = f"/sessions/{session['id']}", {"Authorization": f"Bearer {session['token']}"}
    body = {"messages": [USER], "max_tokens": 2}
    if way == "in mid-answer":
        body |= {"max_tokens": 500, "stream": True}
        async with client.stream("POST", f"{url}/v1/chat/completions", json=body, headers=head) as answer:
            await anext(answer.aiter_lines(), None)
    elif way != "silent":
        answered = await client.post(f"{url}/v1/chat/completions", json=body, headers=head)
        if way == "ended":
            answered.raise_for_status()
            (await client.post(f"{url}/end", json={"reward": 1.0}, headers=head)).raise_for_status()
    return way == "ended"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_thousand_sessions_half_of_them_abandoned_leave_nothing_behind(
    ends: PolicyEnds, gateway: tuple[str, str]
) -> None:
    url, token = gateway

    async def agents(numbers: range) -> list[bool]:
        room, head = asyncio.Semaphore(AGENTS), {"Authorization": f"Bearer {token}"}
        async with httpx.AsyncClient(base_url=url, headers=head, timeout=120) as client:

            async def one(number: int) -> bool:
                async with room:
                    return await work(client, number)

            return await asyncio.gather(*map(one, numbers))

    def run(first: int, count: int) -> list[bool]:
        """Work on rows until all of them have left."""
        rows = [ends.row(first + index) for index in range(count)]
        ends.start(*rows[:1])
        ends.arriving.extend(rows[1:])
        ended = asyncio.run(agents(range(count * SAMPLES)))
        ends.join()
        return ended

    run(0, 1)
    before = living()
    ended = run(1, ROWS)
    assert (len(ended), sum(ended)) == (ROWS * SAMPLES, ROWS * SAMPLES // 2)
    assert len(ends.results) == ROWS + 1
    ends.results.clear()
    wait_until(lambda: not (living() - before), "end of all that the sessions needed")
