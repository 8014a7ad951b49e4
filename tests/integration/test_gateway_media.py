"""Images, sound and video in requests to the gateway outside of sessions, with the SDKs of OpenAI and Anthropic."""

from __future__ import annotations

import base64
import hashlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest

from broker.subjects import RowId
from relax_actors.data.media_admission import MediaAdmission
from relax_actors.data.task import Medium
from relax_actors.engines.protocols import GenerationRequest
from relax_actors.messages import Prompt
from relax_actors.training.media_preparer import MediaPreparer
from tests.support.http_servers import serving
from tests.support.media_gateway import ALLOW, TOKEN, MediaGateway, media_gateway, picture, sound, user, video
from tests.support.messages import assert_says
from tests.support.running import wait_until
from tests.support.tiny_images import png

TOKENS: Any = {"return_token_ids": True}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MediaGateway]:
    with media_gateway(tmp_path_factory.mktemp("gateway"), *ALLOW) as found:
        yield found


def stored(gateway: MediaGateway) -> list[Path]:
    """Files of requests that belong to no session."""
    return list(gateway.ends.rollout.table.store.root.glob("calls-*/*"))


def test_answer_has_the_tokens_and_log_probs_of_the_engine(gateway: MediaGateway, tmp_path: Path) -> None:
    parts = ("1", picture(1), sound(tmp_path), "2", video(tmp_path))
    found = gateway.openai.chat.completions.create(
        model="tiny", messages=user(*parts), logprobs=True, seed=5, temperature=0.7, max_tokens=6, extra_body=TOKENS
    )
    rollout = gateway.ends.rollout
    config, store = rollout.config, rollout.table.store
    assert config.media is not None
    media = [
        Medium("image", data=png(1)),
        Medium("audio", data=(tmp_path / "sound.wav").read_bytes()),
        Medium("video", data=(tmp_path / "video.mp4").read_bytes()),
    ]
    sources = MediaAdmission(config.media, config.model_path, store).sources(media, RowId(0, 0), "direct")
    text = (
        ">1<|vision_bos|><|IMAGE|><|vision_eos|><|audio_bos|><|AUDIO|><|audio_eos|>2"
        "<|vision_bos|><|VIDEO|><|vision_eos|>>"
    )
    tokenizer = gateway.ends.tokenizer
    prompt = Prompt(text, tokenizer.encode(text, special=False), "", {}, 5, 0, media=sources)
    tokens, read = MediaPreparer(config, store).prepare_mapped(prompt, "group/0")
    request = GenerationRequest(tokens, 5, 1, 0.7, 1.0, 6, tokenizer.stop_ids, media=read)
    ((direct,),) = gateway.ends.engine.generate([request], lambda: None)
    (choice,) = found.choices
    assert found.model_extra is not None
    assert choice.model_extra is not None
    assert choice.logprobs is not None
    assert found.model_extra["prompt_token_ids"] == tokens.tolist()
    assert choice.model_extra["token_ids"] == direct.tokens.tolist()
    said = [entry.logprob for entry in choice.logprobs.content or []]
    np.testing.assert_array_equal(np.array(said, np.float32), direct.logprobs)
    assert len(tokens) > len(prompt.tokens) + 3


def test_all_apis_read_the_same_image_and_count_its_tokens(gateway: MediaGateway) -> None:
    data = base64.b64encode(png(2)).decode()
    whole = gateway.openai.chat.completions.create(
        model="tiny", messages=user("3", picture(2)), temperature=0, max_tokens=5
    )
    block: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    messages: Any = user("3", block)
    message = gateway.anthropic.messages.create(
        model="tiny", messages=messages, max_tokens=5, extra_body={"temperature": 0}
    )
    image: Any = {"type": "input_image", "image_url": f"data:image/png;base64,{data}", "detail": "auto"}
    asked: Any = [{"role": "user", "content": [{"type": "input_text", "text": "3"}, image]}]
    response = gateway.openai.responses.create(model="tiny", input=asked, temperature=0, max_output_tokens=5)
    assert whole.usage is not None
    assert response.usage is not None
    assert whole.usage.prompt_tokens == message.usage.input_tokens == response.usage.input_tokens
    texts = [block.text for block in message.content if block.type == "text"]
    assert (whole.choices[0].message.content or "") == "".join(texts) == response.output_text
    count = gateway.anthropic.messages.count_tokens(model="tiny", messages=messages)
    assert count.input_tokens == message.usage.input_tokens
    answer = httpx.post(
        f"{gateway.url}/tokenize",
        json={"messages": user("3", picture(2))},
        headers={"Authorization": f"Bearer {TOKEN}"},
        timeout=60,
    )
    assert answer.json()["count"] == count.input_tokens


def test_streams_and_several_answers_read_media_and_leave_no_files(gateway: MediaGateway) -> None:
    with gateway.openai.chat.completions.create(
        model="tiny", messages=user(picture(3)), n=2, stream=True, max_tokens=4, extra_body=TOKENS
    ) as stream:
        seen = {choice.index for chunk in stream for choice in chunk.choices}
    assert seen == {0, 1}
    with gateway.anthropic.messages.stream(
        model="tiny",
        max_tokens=4,
        messages=[{"role": "user", "content": [_block(3)]}],
    ) as events:
        assert events.get_final_message().usage.input_tokens > 4
    assert wait_until(lambda: not stored(gateway), "removal of the files of requests")


def _block(seed: int) -> Any:
    data = base64.b64encode(png(seed)).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (
            picture(1)["image_url"]["url"][:-60] + "AAAA",
            ("medium 2 of the request", "image cannot be decoded", "send another file"),
        ),
        ("data:image/png;base64,####", ("medium 2 of the request", "base64", "data:")),
        ("/etc/passwd", ("medium 2 of the request", "data URI", "[media.urls]")),
        ("relax-media:0", ("medium 2 of the request", "relax-media:0", "0 media")),
        ("https://example.org/a.png", ("medium 2 of the request", "has no hash", "sha256")),
    ],
)
def test_media_that_cannot_be_used_are_bad_requests(gateway: MediaGateway, part: str, words: tuple[str, ...]) -> None:
    messages = user(picture(1), "5", {"type": "image_url", "image_url": {"url": part}})
    with pytest.raises(openai.BadRequestError) as refused:
        gateway.openai.chat.completions.create(model="tiny", messages=messages)
    said = refused.value.message
    assert_says(said, *words)
    assert "calls-" not in said, "the client knows no files of the store"
    assert wait_until(lambda: not stored(gateway), "removal of the files of a refused request")


def test_damaged_image_of_anthropics_api_is_a_bad_request(gateway: MediaGateway) -> None:
    block = _block(1)
    block["source"]["data"] = block["source"]["data"][: len(block["source"]["data"]) // 8 * 4]
    for ask in (gateway.anthropic.messages.create, gateway.anthropic.messages.count_tokens):
        more: Any = {"max_tokens": 4} if ask == gateway.anthropic.messages.create else {}
        with pytest.raises(anthropic.BadRequestError, match="medium 1 of the request"):
            ask(model="tiny", messages=[{"role": "user", "content": [block]}], **more)


def test_placeholders_without_media_are_refused(gateway: MediaGateway) -> None:
    for text in ("<|IMAGE|>", "<|AUDIO|>"):
        with pytest.raises(openai.BadRequestError, match="placeholder"):
            gateway.openai.chat.completions.create(model="tiny", messages=user(text))
        with pytest.raises(openai.BadRequestError, match="placeholder"):
            gateway.openai.completions.create(model="tiny", prompt=text)


def test_conversation_too_long_with_its_media_says_so(gateway: MediaGateway) -> None:
    with pytest.raises(openai.BadRequestError, match=r"tokens.*shorten"):
        gateway.openai.chat.completions.create(model="tiny", messages=user(*[picture(n) for n in range(80)]))


def test_downloads_delay_neither_each_other_nor_other_media(gateway: MediaGateway) -> None:
    files = {f"/{seed}.png": png(seed) for seed in range(4)}
    asked, goes_on = threading.Semaphore(0), threading.Event()

    class Slow(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.release()
            goes_on.wait(20)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(files[self.path])

        def log_message(self, *arguments: object) -> None:
            pass

    def ask(*parts: Any) -> int:
        found = gateway.openai.chat.completions.create(model="tiny", messages=user(*parts), max_tokens=2)
        assert found.usage is not None
        return found.usage.prompt_tokens

    with serving(Slow) as url, ThreadPoolExecutor(4) as clients:
        waiting = []
        for path, data in files.items():
            address = f"{url}{path}#sha256={hashlib.sha256(data).hexdigest()}"
            waiting.append(clients.submit(ask, {"type": "image_url", "image_url": {"url": address}}))
        for _ in files:
            assert asked.acquire(timeout=20), "the downloads do not go on at once"
        tokens = ask(picture(9))
        assert not any(one.done() for one in waiting)
        goes_on.set()
        assert [one.result(30) for one in waiting] == [tokens] * 4
