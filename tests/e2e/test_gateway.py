"""The live policy of a run over HTTP, with real processes: free requests, versions, and kills."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from relax_actors.data.tokenizer import Tokenizer
from tests.support.gateways import AGENTS, address_of
from tests.support.running import Run, wait_until

NUMBER: Any = {
    "type": "json_schema",
    "json_schema": {"name": "number", "schema": {"type": "integer", "minimum": 100, "maximum": 999}},
}
"""JSON that the alphabet of the run can spell."""
MakeRun = Callable[..., Run]
ASK = [{"role": "user", "content": "say 7"}]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_live_policy_answers_while_it_trains_and_its_gateway_is_killed(make_run: MakeRun) -> None:
    run = make_run("served", "run.steps=100000", config=AGENTS).start()
    url, token = address_of(run)
    assert (run.folder.root / "gateway" / "token").stat().st_mode & 0o777 == 0o600
    tokenizer = Tokenizer(run.folder.root / "model-config")
    versions = set()
    with openai.OpenAI(base_url=f"{url}/v1", api_key=token, max_retries=8, timeout=60) as client:
        for n in range(40):
            if n in (10, 20):
                run.kill("gateway.0")
            if n == 30:
                run.kill("rollout.0")
            found = client.chat.completions.create(
                model="policy", messages=ASK, logprobs=True, extra_body={"return_token_ids": True}, max_tokens=5
            )
            (choice,) = found.choices
            extra = choice.model_extra
            assert extra is not None
            assert found.model_extra is not None
            assert found.model_extra["prompt_token_ids"] == tokenizer.encode(">say 7\n", special=False).tolist()
            assert choice.message.content == tokenizer.decode(extra["token_ids"]).strip()
            assert choice.logprobs is not None
            assert np.isfinite([entry.logprob for entry in choice.logprobs.content or []]).all()
            version, _, fingerprint = (found.system_fingerprint or "").partition("-")
            versions.add(version)
            assert len(fingerprint) == 16
            if n % 8 == 0:
                held = client.chat.completions.create(model="policy", messages=ASK, response_format=NUMBER)
                assert 100 <= int(held.choices[0].message.content or "") <= 999
        same = [
            client.completions.create(model="policy", prompt=">say 3\n", seed=4, temperature=0, max_tokens=4)
            for _ in range(2)
        ]
    assert len(versions) > 1, "the policy that answers does not change with the training"
    if same[0].system_fingerprint == same[1].system_fingerprint:
        assert same[0].choices[0].text == same[1].choices[0].text
    too_long = httpx.post(
        f"{url}/v1/completions",
        json={"prompt": [1] * 256},
        headers={"Authorization": f"Bearer {token}"},
        timeout=60,
    )
    assert (too_long.status_code, too_long.json()["error"]["message"]) == (
        400,
        "the prompt has 256 tokens; the model's context of 256 leaves no room for an answer; shorten the conversation",
    )
    run.end_in_order()


LONG = (
    "rollout.max_tokens=200",
    "rollout.min_tokens=150",
    "rollout.max_concurrent_prompts=1",  # rows of a killed actor are handled alone
    "model.architecture.max_position_embeddings=1024",
    "reward.function=environment",
    "agent.idle_seconds=120",
    "supervision.intensity=50",
    "run.steps=100000",
)
"""Rows that wait for agents, and answers that take seconds."""


def read_some(stream: openai.Stream[Any]) -> str:
    """Read a stream until it has some text."""
    found = ""
    while len(found) < 5:
        found += next(stream).choices[0].delta.content or ""
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_client_that_leaves_in_mid_stream_frees_the_engine_and_kills_are_healed_by_a_retry(make_run: MakeRun) -> None:
    run = make_run("streams", *LONG, config=AGENTS).start()
    url, token = address_of(run)

    def cancelled() -> list[int]:
        """Tokens generated for each client that has left."""
        said = (run.folder.root / "logs" / "rollout.0.log").read_text()
        return [int(found) for found in re.findall(r"event='request_cancelled'.* tokens=(\d+)", said)]

    with openai.OpenAI(base_url=f"{url}/v1", api_key=token, max_retries=30, timeout=60) as client:
        early = client.completions.create(model="policy", prompt=">say 3\n", max_tokens=2)
    assert early.usage is not None
    assert "event='crashed' role='rollout'" not in (run.folder.root / "logs" / "node.log").read_text()
    own = {"Authorization": f"Bearer {token}"}
    taken = wait_until(lambda: taken_from(url, own), "sample", 240)
    ask: Any = {"model": "policy", "messages": ASK, "stream": True}
    with openai.OpenAI(base_url=taken["base_url"], api_key=taken["token"], max_retries=8, timeout=120) as client:
        with client.chat.completions.create(**ask) as stream:
            read_some(stream)
        (tokens,) = wait_until(cancelled, "cancelled request", 60)
        assert 0 < tokens < 150, "the answer ended before its first text arrived, or was not cancelled"
        stream = client.chat.completions.create(**ask)
        read_some(stream)
        run.kill("rollout.0")
        # The actor that takes over repeats the answer; if its tokens differ, the stream ends with an error.
        with suppress(openai.APIError):
            list(stream)
        stream = client.chat.completions.create(**ask)
        read_some(stream)
        run.kill("gateway.0")
        with pytest.raises((openai.APIError, httpx.HTTPError)):
            list(stream)
        answer = client.chat.completions.create(model="policy", messages=ASK)
        assert len(answer.choices[0].message.content or "") > 100
    head = {"Authorization": f"Bearer {taken['token']}"}
    ended = httpx.post(f"{url}/sessions/{taken['id']}/end", headers=head, json={"reward": 1.0}, timeout=60)
    # The second stream ended with a turn, unless its tokens differed; the third and the retry share one.
    assert (ended.status_code, ended.json()["turns"] <= 2) == (200, True)
    run.end_in_order()


def taken_from(url: str, headers: dict[str, str]) -> dict[str, Any] | None:
    """Take a sample of the run; None if none waits yet."""
    try:
        answer = httpx.post(f"{url}/sessions", headers=headers, timeout=30)
    except httpx.HTTPError:
        return None
    return answer.json() if answer.status_code == 200 else None


def test_files_of_the_gateway_stay_in_its_folder(tmp_path: Path) -> None:
    from relax_actors.roles.gateway import gateway_folder

    assert gateway_folder(tmp_path).stat().st_mode & 0o777 == 0o700
