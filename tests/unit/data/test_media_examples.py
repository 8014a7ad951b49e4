"""Examples whose conversations hold media: placeholders, positions, and which tokens are trained."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.store import Store
from broker.subjects import RowId
from relax_actors.config import Config, load_config
from relax_actors.data.examples import ExampleMaker, row_of
from relax_actors.data.model_folder import prepare
from relax_actors.data.prompt_maker import PromptMaker, admission_of
from relax_actors.data.task import Medium, Task
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.errors import RowError
from relax_actors.messages import Prompt, Trajectory
from relax_actors.training.example_media import ExampleMedia
from relax_actors.training.media_preparer import MediaPreparer
from tests.support.messages import assert_says
from tests.support.running import SUPPORT
from tests.support.tiny_images import png, write_video

IMAGES = SUPPORT / "tiny_image_examples.toml"
ROW = RowId(7, 0)
TEMPLATE = """{% for message in messages %}
{%- if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}
{%- if part.type == 'text' %}{{ part.text }}{% else %}<|vision_start|><|{{ part.type }}_pad|><|vision_end|>{% endif %}
{%- endfor %}{% endif %}{% if message.role == 'assistant' %}#{% else %}>{% endif %}{% endfor %}"""
SMALL, WIDE = Medium("image", data=png(1, 16, 16)), Medium("image", data=png(2, 32, 16))
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "<image>12"},
    {"role": "assistant", "content": "34"},
    {"role": "user", "content": "<image>5"},
    {"role": "assistant", "content": "67"},
]


class Made:
    """An example maker with the media of a tiny Qwen3-VL."""

    def __init__(self, folder: Path, *settings: str, template: str = "", context: int = 128) -> None:
        self.config: Config = load_config(IMAGES, [f"run.folder={folder / 'run'}", *settings])
        prepare(self.config, self.config.model_path)
        if template:
            (self.config.model_path / "chat_template.jinja").write_text(template)
        self.store, self.tokenizer = Store(folder / "store"), Tokenizer(self.config.model_path)
        self.prompts = PromptMaker(self.config.data, self.tokenizer, context, 0, admission_of(self.config, self.store))
        self.media = ExampleMedia(self.config, self.store)
        self.media.folder = "group/7"
        of_media = self.media.family, self.media.expand
        self.maker = ExampleMaker(self.config, self.config.data, self.tokenizer, context, *of_media)

    def row(self, prompt: str | list[dict[str, Any]], answer: str = "", *media: Medium, **metadata: Any) -> Trajectory:
        task = Task(prompt, answer, metadata, media=media)
        fields: dict[str, Any] = {"seed": 0, "min_version": 0}
        return self.maker.make(row_of(task, media=self.prompts.media_of(task, ROW), **fields))

    def trained_text(self, row: Trajectory, sequence: int = 0) -> str:
        """Return the trained tokens of a sequence as a text, with `|` between parts that are apart."""
        ids = list(row.iter_tokens())[sequence]
        own = np.split(row.trained, np.cumsum(row.lengths)[:-1])[sequence]
        mask = np.concatenate([np.zeros(len(ids) - len(own), np.bool_), own])
        starts = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0) == 1)
        ends = np.flatnonzero(np.diff(mask.astype(np.int8), append=0) == -1) + 1
        inner = self.tokenizer.inner
        parts = [inner.decode(ids[a:b].tolist(), skip_special_tokens=False) for a, b in zip(starts, ends, strict=True)]
        return "|".join(parts)


@pytest.fixture
def chat(tmp_path: Path) -> Made:
    return Made(tmp_path, 'examples.train=["assistant"]', template=TEMPLATE)


def test_answers_between_two_images_are_trained(chat: Made) -> None:
    row = chat.row(TALK, "", SMALL, WIDE)
    assert chat.trained_text(row) == "34#|67#"
    ((observed,),) = row.observed
    assert [(medium.kind, medium.source, medium.tokens) for medium in observed.media] == [
        ("image", 0, 1),
        ("image", 1, 2),
    ]


def test_positions_are_those_of_the_same_tokens_as_one_prompt(chat: Made) -> None:
    row = chat.row(TALK, "", SMALL, WIDE)
    text = re.sub("<image>", "<|vision_start|><|image_pad|><|vision_end|>", "<image>12>34#<image>5>67#")
    prompt = Prompt(
        text,
        chat.tokenizer.encode(text, special=False),
        "",
        {},
        media=chat.prompts.media_of(Task("", media=(SMALL, WIDE)), ROW),
        seed=0,
        min_version=0,
    )
    whole = MediaPreparer(chat.config, chat.store).prepare(prompt, "group/7")
    ((observed,),) = row.observed
    (tokens,) = row.iter_tokens()
    np.testing.assert_array_equal(tokens, whole.tokens)
    np.testing.assert_array_equal(observed.positions, whole.positions)
    assert [(m.features, m.start) for m in observed.media] == [(m.features, m.start) for m in whole.media]


def test_timestamps_of_a_video_are_not_trained(chat: Made, tmp_path: Path) -> None:
    film = Medium("video", path=str(write_video(tmp_path / "film.mp4")), folder=tmp_path)
    row = chat.row(
        [
            {"role": "user", "content": "1"},
            {"role": "assistant", "content": "2"},
            {"role": "user", "content": "<video>3"},
            {"role": "assistant", "content": "4"},
        ],
        "",
        film,
    )
    assert chat.trained_text(row) == "2#|4#"
    ((observed,),) = row.observed
    (tokens,) = row.iter_tokens()
    assert "second" in chat.tokenizer.inner.decode(tokens.tolist())
    assert observed.positions.shape[1] == len(tokens)


def test_placeholders_are_not_trained_where_all_text_is(tmp_path: Path) -> None:
    made = Made(tmp_path, "examples.train=all")
    assert made.trained_text(made.row("1<image>2", "3", WIDE)) == "<|vision_start|>|<|vision_end|>23#"


def test_both_answers_of_a_pair_see_the_image(tmp_path: Path) -> None:
    made = Made(tmp_path, "algorithm.name=dpo", "roles.reference.replicas=1")
    row = made.row("<image>1>", "", SMALL, chosen="2", rejected="345")
    assert [made.trained_text(row, i) for i in range(2)] == ["2#", "345#"]
    (one,), (other,) = row.observed
    assert [medium.features for medium in one.media] == [medium.features for medium in other.media]
    assert len(one.media) == 1


def test_example_of_text_alone_has_positions(tmp_path: Path) -> None:
    row = Made(tmp_path).row("1>", "2")
    ((observed,),) = row.observed
    assert (observed.media, observed.positions[0].tolist()) == ([], [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("context", "trained", "images"), [(12, "34#", 1), (13, "34#", 1), (15, "34#", 1), (128, "34#|67#", 2)]
)
def test_cut_example_keeps_media_whole(tmp_path: Path, context: int, trained: str, images: int) -> None:
    settings = ('examples.train=["assistant"]', "data.oversize=truncate_right")
    made = Made(tmp_path, *settings, template=TEMPLATE, context=context)
    row = made.row(TALK, "", SMALL, WIDE)
    ((observed,),) = row.observed
    assert (made.trained_text(row), len(observed.media)) == (trained, images)
    assert row.finish_reasons == (["stop"] if context == 128 else ["length"])


@pytest.mark.parametrize(
    ("media", "words"),
    [((), ("2 placeholders", "0 media")), ((SMALL, WIDE, SMALL), ("2 placeholders", "3 media"))],
)
def test_media_must_fit_placeholders(chat: Made, media: tuple[Medium, ...], words: tuple[str, ...]) -> None:
    with pytest.raises(RowError) as caught:
        chat.row(TALK, "", *media)
    assert_says(caught.value, *words)


def test_settings_of_a_data_set_apply_to_its_media(tmp_path: Path) -> None:
    made = Made(tmp_path, "data.media.image.max_pixels=256", "data.media.image.min_pixels=256")
    row = made.row("<image>1>", "2", Medium("image", data=png(3, 32, 32)))
    ((observed,),) = row.observed
    assert observed.media[0].tokens == 1


def test_model_of_text_alone_refuses_media(tmp_path: Path) -> None:
    config = load_config(SUPPORT / "tiny_examples.toml", [f"run.folder={tmp_path / 'run'}"])
    prepare(config, config.model_path)
    prompts = PromptMaker(config.data, Tokenizer(config.model_path), 64, 0)
    with pytest.raises(RowError, match="text alone"):
        prompts.media_of(Task("1>", "2", media=(SMALL,)))
