"""Agents that show pictures to the model: the trainer has the log-probs of the rollout, whatever is killed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from relax_actors.messages import Trajectory
from tests.support.faults import story_of, wait_for_cell
from tests.support.gateways import address_of
from tests.support.kills import stopped_root
from tests.support.media_gateway import picture, user
from tests.support.running import SUPPORT, Run, wait_until
from tests.support.sglang_servers import skip_if_missing

IMAGES = SUPPORT / "tiny_images.toml"
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}#{% else %}>"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'text' %}{{ p.text }}{% else %}" + PICTURE + "{% endif %}{% endfor %}{% endif %}>{% endif %}"
    "{% endfor %}"
)
SETTINGS = (
    f"model.tokenizer.chat_template={TEMPLATE}",
    "model.architecture.text_config.max_position_embeddings=512",
    "trainer.max_tokens_per_microbatch=2048",
    "agent.function=tiny_agents.look",
    "gateway.port=0",
    "reward.function=environment",
    "staleness.max=0",
    "run.steps=3",
    "trainer.checkpoint_every=100",
)
SERVED = ("rollout.backend=sglang", "supervision.heartbeat=30", "supervision.start_deadline=400")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("backend", ["transformers", "sglang"])
def test_pictures_of_agents_are_read_and_trained_after_a_kill(make_run: Callable[..., Run], backend: str) -> None:
    if backend == "sglang":
        skip_if_missing()
    run = make_run("seen", *SETTINGS, *(SERVED if backend == "sglang" else ()), config=IMAGES).start()
    subject = f"relax.{run.name}.group.1.0.trajectory"
    wait_for_cell(run, "group.1.0.turns.0.2", 600)
    run.kill("rollout.0")
    with stopped_root(run):
        trajectory = wait_until(lambda: run.table.fetch(subject, Trajectory), "trajectory", 600)
    assert isinstance(trajectory, Trajectory)
    run.disconnect()
    code, result, said = run.finish(900)
    assert code == 0, said
    assert (result["steps"], result["trained"]) == (3, 12)
    assert (result["quarantined"], result["dropped"], result["in_flight"]) == (0, 0, 0)
    for observed in trajectory.observed:
        assert sum(len(one.sources) for one in observed) >= 2, "the picture of the task, or none, and two of the agent"
    steps = story_of(run).steps()
    assert len(steps) == 3
    assert all(step["abs_delta"] <= 1e-4 for step in steps)
    texts = [str(message["content"]) for sample in trajectory.samples for message in sample.messages]
    assert not any("base64" in text for text in texts), "conversations name media by their hashes"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("backend", ["transformers", "sglang"])
def test_pictures_of_requests_outside_of_sessions_are_read(make_run: Callable[..., Run], backend: str) -> None:
    if backend == "sglang":
        skip_if_missing()
    served = SERVED if backend == "sglang" else ()
    run = make_run("asked", *SETTINGS[:3], *served, "gateway.port=0", "run.steps=100000", config=IMAGES).start()
    url, token = address_of(run)

    def ask(text: str, *parts: Any) -> Any:
        return client.chat.completions.create(
            model="policy", messages=user(text, *parts), logprobs=True, extra_body={"return_token_ids": True}
        )

    with openai.OpenAI(base_url=f"{url}/v1", api_key=token, max_retries=30, timeout=120) as client:
        plain, seen = ask("1"), ask("1", picture(1), picture(2))
        entries = seen.choices[0].logprobs.content
        assert entries
        assert all(-50 < entry.logprob <= 0 for entry in entries)
        assert seen.usage.prompt_tokens == len(seen.prompt_token_ids) > plain.usage.prompt_tokens + 4
        body = {"messages": user("1", picture(1), picture(2))}
        headers = {"Authorization": f"Bearer {token}"}
        counted = httpx.post(f"{url}/tokenize", json=body, headers=headers, timeout=120).json()
        assert counted["tokens"] == seen.prompt_token_ids
        with pytest.raises(openai.BadRequestError, match="medium 1 of the request"):
            ask("1", {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}})
    run.end_in_order()
