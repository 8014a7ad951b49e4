"""Episodes on an SGLang server: whatever is killed, only the turns in flight are generated again."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from tests.chaos.test_sglang import LONG, ON_POLICY, SERVED, kill_server
from tests.chaos.test_turns import EPISODES, IMAGES, PICTURES
from tests.support.faults import story_of, wait_for_cell
from tests.support.gateways import address_of
from tests.support.running import Run, processes_of
from tests.support.sglang_servers import skip_if_missing
from tests.support.turn_counter import TurnCounter

skip_if_missing()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
MakeRun = Callable[..., Run]
SMALL_CACHE = "rollout.sglang.kv_tokens=200"
"""Room for about eight of the sixteen conversations of a step."""


def ask(url: str, token: str) -> int:
    """Ask the live policy for eight tokens; return how many came."""
    answer = httpx.post(
        f"{url}/v1/completions",
        json={"prompt": "123>", "max_tokens": 8, "return_token_ids": True},
        headers={"Authorization": f"Bearer {token}"},
        timeout=300,
    )
    assert answer.status_code == 200, answer.text
    return len(answer.json()["choices"][0]["token_ids"])


def test_episodes_and_requests_go_on_after_kills_of_server_and_rollout(make_run: MakeRun) -> None:
    run = make_run("turns", *SERVED, *EPISODES, SMALL_CACHE, "staleness.max=0", "gateway.port=0", "run.steps=16")
    counter = TurnCounter(run.start())
    wait_for_cell(run, "group.1.1.turns.0.1", LONG)
    url, token = address_of(run)
    assert 1 <= ask(url, token) <= 8
    kill_server(run)
    wait_for_cell(run, "group.8.0.turns.0.1", LONG)
    assert 1 <= ask(url, token) <= 8
    run.kill("rollout.0")
    run.disconnect()
    code, result, said = run.finish(LONG)
    counter.close()
    assert code == 0, said
    assert (result["trained"], result["dropped"], result["quarantined"], result["in_flight"]) == (64, 0, 0, 0)
    assert counter.twice == []
    assert len(counter.turns) > 200
    story = story_of(run)
    assert story.of("environment_failed") == []
    steps = story.steps()
    assert len(steps) == 16
    assert all(step["abs_delta"] < 1e-5 for step in steps)
    # The first requests of an actor find an empty cache.
    served = [metric for metric in story.metrics if metric.get("prompt_tokens", 0) > 1000]
    assert served
    assert all(metric["cached_prompt_tokens"] > 0.5 * metric["prompt_tokens"] for metric in served)
    assert all(metric["retracted_samples"] == 0 for metric in served)
    assert processes_of(run.folder.root) == []


def test_on_policy_episodes_end_with_the_same_weights_after_kills(make_run: MakeRun) -> None:
    alone = make_run("calm", *ON_POLICY, *EPISODES).complete(LONG)["weights_fingerprint"]
    run = make_run("killed", *ON_POLICY, *EPISODES).start()
    counter = TurnCounter(run)
    wait_for_cell(run, "group.1.1.turns.0.1", LONG)
    kill_server(run)
    wait_for_cell(run, "group.2.2.turns.0.2", LONG)  # the next server generates
    run.kill("rollout.0")
    run.disconnect()
    code, result, said = run.finish(LONG)
    counter.close()
    assert code == 0, said
    assert result["weights_fingerprint"] == alone
    assert (result["dropped"], result["quarantined"], result["in_flight"]) == (0, 0, 0)
    assert counter.twice == []


def test_episodes_with_pictures_go_on_after_kills_of_server_and_rollout(make_run: MakeRun) -> None:
    settings = (*SERVED, *PICTURES, "staleness.max=0", "run.steps=8")
    run = make_run("pictures", *settings, config=IMAGES)
    counter = TurnCounter(run.start())
    wait_for_cell(run, "group.1.1.turns.0.1", LONG)
    kill_server(run)
    wait_for_cell(run, "group.4.0.turns.0.1", LONG)
    run.kill("rollout.0")
    run.disconnect()
    code, result, said = run.finish(LONG)
    counter.close()
    assert code == 0, said
    assert (result["trained"], result["dropped"], result["quarantined"], result["in_flight"]) == (32, 0, 0, 0)
    assert counter.twice == []
    story = story_of(run)
    assert story.of("environment_failed") == []
    steps = story.steps()
    assert len(steps) == 8
    assert all(step["abs_delta"] < 1e-4 for step in steps)
