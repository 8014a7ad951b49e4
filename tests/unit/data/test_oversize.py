"""Prompts that are too long: refused, kept, or cut off inside of the chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relax_actors.config import validate
from relax_actors.data.character_tokenizer import make_character_tokenizer
from relax_actors.data.prompt_maker import PromptMaker
from relax_actors.data.task import Medium, Task
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.errors import RowError
from relax_actors.messages import Prompt

TEMPLATE = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}<a>"
LONG = Task("abcdefghijklmno", origin="rows.jsonl line 7")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ids = make_character_tokenizer("abcdefghijklmnopqrstuvwxyz<>:#", "#", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(ids))
    return tmp_path


def made(folder: Path, task: Task, oversize: str, whole: int = 20, **data: Any) -> Prompt:
    """Make a prompt whose completion has 10 tokens."""
    body = {"model": {"path": str(folder)}, "data": {"kind": "jsonl", "oversize": oversize, **data}}
    maker = PromptMaker(validate(body, "t").data, Tokenizer(folder), whole, 10)
    return maker.make(task, seed=0, min_version=0)


@pytest.mark.parametrize(("oversize", "text"), [("truncate_left", "fghijklmno"), ("truncate_right", "abcdefghij")])
def test_prompt_loses_its_beginning_or_end(folder: Path, oversize: str, text: str) -> None:
    prompt = made(folder, LONG, oversize)
    assert (prompt.text, len(prompt.tokens), prompt.metadata) == (text, 10, {"cut_tokens": 5})
    assert made(folder, Task("abc"), oversize).metadata == {}


@pytest.mark.parametrize(("oversize", "text"), [("truncate_left", ":lmno:<a>"), ("truncate_right", ":abcd:<a>")])
def test_template_around_a_cut_prompt_stays_whole(folder: Path, oversize: str, text: str) -> None:
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    prompt = made(folder, LONG, oversize, whole=22, template=":{prompt}:")
    assert prompt.text == f"<u>{text}"
    chat = [{"role": "system", "content": "be"}, {"role": "user", "content": LONG.prompt}]
    assert made(folder, Task(chat), oversize, whole=25).text == f"<s>be<u>{text[1:5]}<a>"


def test_kept_prompt_leaves_at_least_one_token(folder: Path) -> None:
    assert made(folder, LONG, "keep").text == LONG.prompt
    assert made(folder, LONG, "keep", whole=16).text == LONG.prompt
    with pytest.raises(RowError, match=r"15 tokens, more than the 14"):
        made(folder, LONG, "keep", whole=15)


def test_skipped_prompt_names_its_length_and_the_setting(folder: Path) -> None:
    with pytest.raises(RowError, match=r"^rows.jsonl line 7: .*15 tokens, more than the 10 .*data\.oversize"):
        made(folder, LONG, "skip")


def test_prompt_without_text_to_cut_is_refused(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with pytest.raises(RowError, match="more than the 10"):
        made(folder, Task([{"role": "system", "content": str(LONG.prompt)}]), "truncate_left")
    with pytest.raises(RowError, match="more than the 5"):
        made(folder, LONG, "truncate_left", whole=15)
    with pytest.raises(RowError, match="takes text alone"):
        made(folder, Task("<image>" + str(LONG.prompt), media=(Medium("image", path="a.png"),)), "truncate_left")
