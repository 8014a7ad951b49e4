"""Messages of megabytes from clients and agents of a real run: refused at once, and nobody dies of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.support.gateways import AGENTS, address_of
from tests.support.long_texts import long_texts
from tests.support.running import Run, wait_until

TEXTS = long_texts(1_900_000)
ANSWER_SECONDS = 10.0
"""Time for a refusal, most of which the machine of a test needs for other things."""
SETTINGS = ("reward.function=environment", "agent.idle_seconds=600", "run.steps=100000")


def gateway_of(run: Run) -> tuple[str, dict[str, str]]:
    """URL and credentials of a run's gateway."""
    url, token = address_of(run)
    return url, {"Authorization": f"Bearer {token}"}


def session_of(url: str, own: dict[str, str]) -> tuple[str, dict[str, str]]:
    """Take a sample; return the URL and the credentials of its session."""

    def taken() -> Any:
        answer = httpx.post(f"{url}/sessions", headers=own, json={}, timeout=60)
        return answer.json() if answer.status_code == 200 else None

    sample = wait_until(taken, "sample", 240)
    return sample["base_url"], {"Authorization": f"Bearer {sample['token']}"}


def requests(url: str, own: dict[str, str], base: str, agent: dict[str, str]) -> Iterator[tuple[str, Any, Any]]:
    """Yield requests with each of the texts, to every route that takes one."""
    for text in TEXTS.values():
        chat = {"messages": [{"role": "user", "content": text}]}
        yield f"{url}/v1/chat/completions", own, chat
        yield f"{url}/v1/completions", own, {"prompt": text}
        yield f"{url}/tokenize", own, {"prompt": text}
        yield f"{base}/chat/completions", agent, chat
        yield f"{base}/messages", agent, chat
        yield f"{base}/responses", agent, {"input": text}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_messages_of_megabytes_are_refused_at_once_and_kill_no_actor(make_run: Callable[..., Run]) -> None:
    run = make_run("long", *SETTINGS, config=AGENTS).start()
    url, own = gateway_of(run)
    base, agent = session_of(url, own)
    for path, head, body in requests(url, own, base, agent):
        began = time.monotonic()
        answer = httpx.post(path, headers=head, json=body, timeout=60)
        assert time.monotonic() - began < ANSWER_SECONDS, path
        assert (answer.status_code, "bytes" in answer.text) in ((400, True), (413, True)), (path, answer.text[:300])
    short = {"messages": [{"role": "user", "content": "say 7"}]}
    assert httpx.post(f"{base}/chat/completions", headers=agent, json=short, timeout=60).status_code == 200
    said = (run.folder.root / "logs" / "node.log").read_text()
    assert "event='crashed'" not in said
    state = run.table.snapshot([run.table.subjects.column("quarantined")])
    assert not list(state)
    run.end_in_order()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_request_that_kills_two_actors_is_refused_and_the_row_of_its_session_goes_on(
    make_run: Callable[..., Run],
) -> None:
    settings = (*SETTINGS, "rollout.actor=tiny_poison.FragileRollout", "supervision.intensity=20")
    run = make_run("poison", *settings, config=AGENTS).start()
    url, own = gateway_of(run)
    (base, agent), (other_base, other) = (session_of(url, own) for _ in range(2))

    def ask(at: str, head: dict[str, str], text: str) -> tuple[int, str]:
        body = {"messages": [{"role": "user", "content": text}]}
        answer = httpx.post(f"{at}/chat/completions", headers=head, json=body, timeout=300)
        return answer.status_code, str((answer.json().get("error") or {}).get("code", ""))

    for _ in range(2):
        assert ask(base, agent, "poison") == (422, "request_killed_actors")
        assert ask(other_base, other, "say 7") == (200, "")
    said = (run.folder.root / "logs" / "node.log").read_text()
    assert said.count("event='crashed' role='rollout'") == 2
    assert not list(run.table.snapshot([run.table.subjects.column("quarantined")]))
    run.end_in_order()
