"""Examples and pairs from rows of the data: which tokens are trained, and which rows are refused."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_actors.config import Config, load_config
from relax_actors.data.examples import ExampleMaker, row_of
from relax_actors.data.field_names import FieldNames
from relax_actors.data.fields import RowFields, task_of
from relax_actors.data.task import Task
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.errors import RowError
from relax_actors.messages import Trajectory
from relax_actors.training.samples import sign_of_samples
from tests.support.chat_folder import make_chat_folder
from tests.support.chat_templates import SMOLLM2

SFT = Path(__file__).parents[3] / "examples" / "sft" / "sft.toml"
TAGGED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REWRITING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}...{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Earlier answers are shortened, as templates do that drop reasoning."""
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "four"},
]


class Made:
    """An example maker over a tokenizer of characters, with what it trains as text."""

    def __init__(
        self,
        folder: Path,
        *settings: str,
        template: str = SMOLLM2,
        context: int = 500,
        stops: Sequence[str] = ("<|im_end|>",),
    ) -> None:
        config: Config = load_config(SFT, list(settings))
        self.tokenizer = Tokenizer(make_chat_folder(folder, template, stops))
        self.maker = ExampleMaker(config, config.data, self.tokenizer, context)

    def row(self, prompt: str | list[dict[str, Any]], answer: str = "", **metadata: Any) -> Trajectory:
        return self.maker.make(row_of(Task(prompt, answer, metadata), seed=0, min_version=0))

    def trained(self, prompt: str | list[dict[str, Any]], answer: str = "", **metadata: Any) -> list[str]:
        """Each run of trained tokens as text."""
        row = self.row(prompt, answer, **metadata)
        parts = np.split(np.arange(len(row.trained)), np.flatnonzero(np.diff(row.trained)) + 1)
        texts = [row.token_ids[part] for part in parts if row.trained[part[0]]]
        return [str(self.tokenizer.inner.decode(ids.tolist(), skip_special_tokens=False)) for ids in texts]

    def text(self, row: Trajectory) -> str:
        ids = [*row.prompt_tokens.tolist(), *row.token_ids.tolist()]
        return str(self.tokenizer.inner.decode(ids, skip_special_tokens=False))


def test_long_document_is_split_into_pieces_that_train_every_token_once(tmp_path: Path) -> None:
    settings = ("data.chat=false", "examples.train=all", "data.oversize=split")
    whole = Made(tmp_path, *settings).row("abcdefghijklmnopqrstuvw")
    row = Made(tmp_path / "s", *settings, context=10).row("abcdefghijklmnopqrstuvw")
    assert (row.counts.tolist(), row.finish_reasons, row.texts) == ([3], ["stop"], whole.texts)
    pieces = list(row.iter_tokens())
    assert max(map(len, pieces)) == 10
    assert all(before[-1] == after[0] for before, after in pairwise(pieces))
    assert np.concatenate([piece[1:] for piece in pieces]).tolist() == next(whole.iter_tokens())[1:].tolist()
    assert int(row.trained.sum()) == int(whole.trained.sum())


def test_pieces_without_a_trained_token_are_left_out(tmp_path: Path) -> None:
    made = Made(tmp_path, "data.chat=false", "data.oversize=split", context=10)
    row = made.row("abcdefghijklmnopqrstuvw", "xy")
    assert row.counts.tolist() == [1]
    assert row.texts == ["xy"]


def test_answer_and_its_stop_token_are_trained(tmp_path: Path) -> None:
    made = Made(tmp_path, "data.chat=false")
    assert made.trained("2 + 2 =", " 4") == [" 4<|im_end|>"]
    assert made.trained("2 + 2 =", " 4<|im_end|>") == [" 4<|im_end|>"]
    row = made.row("2 + 2 =", " 4")
    assert made.text(row) == "2 + 2 = 4<|im_end|>"
    assert not row.is_sampled
    assert row.staleness(7) == 0


def test_text_without_an_answer_is_trained_whole_if_asked_for(tmp_path: Path) -> None:
    made = Made(tmp_path, "data.chat=false", "examples.train=all")
    assert made.trained("abc") == ["bc<|im_end|>"]
    with pytest.raises(RowError, match="no answer"):
        Made(tmp_path, "data.chat=false").row("abc")


@pytest.mark.parametrize("template", [SMOLLM2, TAGGED], ids=["prefixes", "generation tags"])
def test_messages_are_trained_as_the_setting_says(tmp_path: Path, template: str) -> None:
    def trained(*settings: str) -> list[str]:
        return Made(tmp_path, *settings, template=template).trained(TALK)

    assert trained() == ["four<|im_end|>"]
    assert trained("examples.train=['assistant']") == ["two<|im_end|>", "four<|im_end|>"]
    assert trained("examples.train=['user']")[-1].strip() == "<|im_start|>user\nthree<|im_end|>"


def test_message_says_itself_whether_it_is_trained(tmp_path: Path) -> None:
    talk = [TALK[0], TALK[1] | {"train": True}, TALK[2], TALK[3] | {"train": False}]
    assert Made(tmp_path).trained(talk) == ["two<|im_end|>"]
    assert Made(tmp_path, "examples.train=['assistant']").trained([*TALK[:3], talk[3]]) == ["two<|im_end|>"]


def test_chat_prompt_with_an_answer_is_what_generation_reads(tmp_path: Path) -> None:
    made = Made(tmp_path)
    row = made.row("one", "two")
    asked = made.tokenizer.encode(made.tokenizer.chat([TALK[0]]), special=False)
    assert row.prompt_tokens.tolist() == asked.tolist()
    assert row.texts == ["two"]


def test_template_that_rewrites_earlier_messages_is_refused_by_name(tmp_path: Path) -> None:
    made = Made(tmp_path, "examples.train=['assistant']", template=REWRITING)
    with pytest.raises(RowError, match=r"message 2 \(assistant\).*generation"):
        made.row(TALK)
    assert Made(tmp_path, template=REWRITING).trained(TALK) == ["four<|im_end|>"]


def test_long_example_is_refused_or_cut_off(tmp_path: Path) -> None:
    settings = ("data.chat=false",)
    with pytest.raises(RowError, match=r"15 tokens.*10.*set data.oversize"):
        Made(tmp_path, *settings, context=10).row("2 + 2 =", " 4 4 4 ")
    made = Made(tmp_path, *settings, "data.oversize=truncate_right", context=10)
    row = made.row("2 + 2 =", " 4 4 4 ")
    assert made.text(row) == "2 + 2 = 4 "
    assert row.finish_reasons == ["length"]
    with pytest.raises(RowError, match="none of its tokens is trained"):
        made.row("2 + 2 + 2 + 2 =", " 8")


def test_example_may_lose_its_beginning(tmp_path: Path) -> None:
    made = Made(tmp_path, "data.chat=false", "data.oversize=truncate_left", context=10)
    row = made.row("2 + 2 =", " 4 4 4 ")
    assert (made.text(row), row.texts, row.finish_reasons) == (" = 4 4 4 <|im_end|>", [" 4 4 4 "], ["length"])
    pairs = Made(tmp_path / "p", "algorithm.name=dpo", "data.chat=false", "data.oversize=truncate_left", context=9)
    row = pairs.row("2 + 2 =", chosen=" 4 4", rejected=" 5")
    assert pairs.tokenizer.decode(row.prompt_tokens) == " 2 ="
    assert row.texts == [" 4 4", " 5"]


def test_row_that_no_cell_holds_is_refused() -> None:
    with pytest.raises(RowError, match=r"line 3.*bytes, more than"):
        row_of(Task("1", "2" * (4 << 20), origin="line 3"), seed=0, min_version=0)


def test_conversation_that_ends_with_the_user_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RowError, match="ends with a message of the role 'user'"):
        Made(tmp_path).row(TALK[:3])


def test_pair_shares_its_prompt_and_has_signs_by_order(tmp_path: Path) -> None:
    made = Made(tmp_path, "algorithm.name=dpo", "data.chat=false")
    row = made.row("2 + 2 =", chosen=" 4", rejected=" 22")
    assert made.tokenizer.decode(row.prompt_tokens) == "2 + 2 ="
    assert row.texts == [" 4", " 22"]
    assert sign_of_samples(row).values.tolist() == [1, -1]


def test_answers_of_a_pair_may_be_messages_or_whole_conversations(tmp_path: Path) -> None:
    made = Made(tmp_path, "algorithm.name=dpo")
    texts = made.row("one", chosen="two", rejected="three")
    messages = {"chosen": [{"role": "assistant", "content": "two"}], "rejected": "three"}
    assert made.text(made.row("one", **messages)) == made.text(texts)
    whole = {"chosen": TALK[:2], "rejected": [TALK[0], TALK[1] | {"content": "three"}]}
    assert made.text(made.row("ignored", **whole)) == made.text(texts)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"chosen": "4"}, "no field 'rejected'"),
        ({"chosen": "4", "rejected": "4"}, "are the same"),
        ({"chosen": "4", "rejected": 5}, "neither a text nor a list of messages"),
        ({"chosen": "4" * 300, "rejected": "5"}, "half of which is for the other answer"),
    ],
)
def test_bad_pair_is_refused_with_the_reason(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    settings = ("algorithm.name=dpo", "data.chat=false", "trainer.max_tokens_per_microbatch=500")
    with pytest.raises(RowError, match=said):
        Made(tmp_path, *settings).row("2 + 2 =", **fields)


def test_a_pair_has_one_prompt_and_two_answers(tmp_path: Path) -> None:
    made = Made(tmp_path, "algorithm.name=dpo")
    other = [TALK[0] | {"content": "another question"}, TALK[1]]
    with pytest.raises(RowError, match="different prompts"):
        made.row("ignored", chosen=TALK[:2], rejected=other)
    settings = ("algorithm.name=dpo", "data.chat=false", "data.oversize=truncate_right")
    cut = Made(tmp_path / "cut", *settings, context=12)
    assert cut.row("2 + 2 =", chosen=" 4", rejected=" 5").texts == [" 4", " 5"]
    with pytest.raises(RowError, match="the same tokens, as far as"):
        cut.row("2 + 2 =", chosen=" 4 4 4 4 5", rejected=" 4 4 4 4 6")


def test_tools_and_their_calls_reach_the_template(tmp_path: Path) -> None:
    template = (
        "{% if tools %}<|im_start|>tools {{ tools[0].name }}<|im_end|>{% endif %}{% for m in messages %}"
        "<|im_start|>{{ m.role }} {{ m.content }}{% for c in m.tool_calls or [] %}call {{ c.name }}{% endfor %}"
        "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
    )
    call = {"role": "assistant", "tool_calls": [{"name": "add"}], "train": True}
    task = task_of(
        {"prompt": [TALK[0], call], "tools": [{"name": "add"}]}, "line 1", RowFields(FieldNames({}), tmp_path)
    )
    made = Made(tmp_path, template=template)
    row = made.maker.make(row_of(task, seed=0, min_version=0))
    assert made.text(row) == (
        "<|im_start|>tools add<|im_end|><|im_start|>user one<|im_end|><|im_start|>assistant call add<|im_end|>"
    )
    assert row.texts == ["call add"]


def test_labelled_answer_comes_with_the_answer_to_another_prompt(tmp_path: Path) -> None:
    made = Made(tmp_path, "algorithm.name=kto", "data.chat=false")
    row = row_of(Task("2 + 2 =", " 5", {"label": False}), Task("3 + 3 =", " 6"), seed=0, min_version=0)
    found = made.maker.make(row)
    assert found.texts == [" 5", " 6"]
    assert sign_of_samples(found).values.tolist() == [-1, 0]
    assert sign_of_samples(made.row("2 + 2 =", " 4", label=True)).values.tolist() == [1]
    with pytest.raises(RowError, match=r"'label' is 'good'.*true"):
        made.row("2 + 2 =", " 4", label="good")
