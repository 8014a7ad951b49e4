"""Gateway and rollout of a tiny model that sees and hears, with a real broker, engine and HTTP server."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import openai

from relax_actors.config import load_config
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.engines.torch.model import build, tensors_of
from relax_actors.engines.transformers.engine import TransformersEngine
from relax_actors.media import family_of
from relax_actors.runtime import Context
from relax_actors.serving.answers import Answers, Limits
from relax_actors.serving.app import Access, Gateway
from relax_actors.serving.listening import listen
from relax_actors.serving.server import HttpServer
from relax_actors.sessions.message_media import MessageMedia
from relax_actors.sessions.observation_media import ObservationMedia
from relax_actors.sessions.service import GenerationService
from relax_actors.training.row_media import RowMedia
from relax_actors.training.stops import stops_of
from tests.support.asked import answer
from tests.support.embedded import Embedded
from tests.support.models import publish
from tests.support.running import IMAGES
from tests.support.service_ends import RUN, ServiceEnds
from tests.support.tiny_images import png, write_sound, write_video
from tests.support.tiny_media_models import architecture_of

TOKEN = "gateway-token-of-tests"  # noqa: S105
LIMITS = Limits(max_body_bytes=4 << 20, max_concurrent=64, request_seconds=60.0)
TEMPLATE = (
    "{% for m in messages %}>{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'text' %}{{ p.text }}{% elif p.type == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>"
    "{% else %}<|vision_bos|>{{ '<|IMAGE|>' if p.type == 'image' else '<|VIDEO|>' }}<|vision_eos|>{% endif %}"
    "{% endfor %}{% endif %}>{% endfor %}"
)
ALLOW = ("media.urls.allow=true", "media.urls.private=true")


def toml(value: Any) -> str:
    """Return a value as inline TOML."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else repr(value)


class MediaEnds(ServiceEnds):
    """Both ends, with an engine of random weights.

    Attributes:
        engine: generates requests one by one.
        media: prepares media of messages.
        tokenizer: tokenizer of the model.
        rollout: context of the rollout.
    """

    def make_service(self, rollout: Context) -> GenerationService:
        path = rollout.config.model_path
        self.rollout, self.engine = rollout, TransformersEngine(path)
        self.engine.load(1, *publish(tensors_of(build(path, seed=3)), path.parent / "published.safetensors"))
        self.media = MessageMedia(ObservationMedia(rollout, RowMedia(rollout)))
        self.tokenizer = tokenizer = Tokenizer(path)
        stops = partial(stops_of, tokenizer)
        return GenerationService(rollout, self.requests, tokenizer, self.engine.context_length, stops, {}, self.media)

    def generate(self, ended: threading.Event) -> None:
        """Generate what is asked, until `ended` is set."""
        while not ended.wait(0.005):
            for ticket in self.requests.take(8):
                ((sample,),) = self.engine.generate([ticket.request], lambda: None)
                answer(ticket, sample)


class MediaGateway:
    """Address and clients of the gateway, and what stands behind it."""

    def __init__(self, url: str, ends: MediaEnds) -> None:
        self.url, self.ends = url, ends
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key=TOKEN, max_retries=0, timeout=60)
        self.anthropic = anthropic.Anthropic(base_url=url, api_key=TOKEN, max_retries=0, timeout=60)

    def close(self) -> None:
        self.openai.close()
        self.anthropic.close()


@contextmanager
def media_gateway(folder: Path, *settings: str) -> Iterator[MediaGateway]:
    """Start broker, rollout and gateway of a tiny Qwen2.5-Omni."""
    architecture = architecture_of("qwen2_5_omni_thinker")
    own = ("gateway.port=0", f"model.architecture={toml(architecture)}", *settings)
    own += (f"model.tokenizer.chat_template={TEMPLATE}",)
    broker = Embedded(folder / "broker", load_config(IMAGES, [f"run.name={RUN}", *own]))
    broker.start()
    ends, ended = MediaEnds(broker, folder, own, IMAGES), threading.Event()
    thread = threading.Thread(target=ends.generate, args=(ended,), daemon=True)
    thread.start()
    path = ends.rollout.config.model_path
    family = family_of(path)
    assert family is not None
    answers = Answers(ends.policy, Tokenizer(path), "tiny", ends.engine.context_length, LIMITS, family.kinds)
    server = HttpServer(Gateway(answers, Access((TOKEN,), "secret"), LIMITS).app(), listen("127.0.0.1", 0))
    ends.connection.call(server.start(), 20)
    found = MediaGateway(server.url, ends)
    try:
        yield found
    finally:
        found.close()
        ends.connection.call(server.stop(answers.close), 20)
        ended.set()
        thread.join(10)
        ends.service.close()
        ends.close()
        broker.stop()


def uri(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def picture(seed: int = 1) -> dict[str, Any]:
    """Return an image as OpenAI's chat completions have it."""
    return {"type": "image_url", "image_url": {"url": uri("image/png", png(seed)), "detail": "low"}}


def sound(folder: Path) -> dict[str, Any]:
    data = base64.b64encode(write_sound(folder / "sound.wav", 0.05).read_bytes()).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def video(folder: Path) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": uri("video/mp4", write_video(folder / "video.mp4").read_bytes())}}


def user(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}]
