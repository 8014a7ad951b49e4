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


def scored(made: Made, row: Trajectory) -> list[tuple[str, float]]:
    """Text up to each place where a score is read, and what the score is compared with."""
    assert row.targets is not None
    found, begin = [], 0
    for length in row.lengths.tolist():
        own = slice(begin, begin + length)
        for place in np.flatnonzero(row.trained[own]).tolist():
            ids = [*row.prompt_tokens.tolist(), *row.token_ids[own][: place + 1].tolist()]
            text = str(made.tokenizer.inner.decode(ids, skip_special_tokens=False))
            found.append((text, float(row.targets[own][place])))
        begin += length
    return found


PAIR_SCORES = ("algorithm.name=reward_model", "data.chat=false")


def test_scores_of_a_pair_are_read_at_the_stop_tokens(tmp_path: Path) -> None:
    made = Made(tmp_path, *PAIR_SCORES)
    row = made.row("1 + 1 =", chosen=" 2", rejected=" 11")
    assert scored(made, row) == [("1 + 1 = 2<|im_end|>", 0.0), ("1 + 1 = 11<|im_end|>", 0.0)]
    assert row.texts == [" 2", " 11"]
    assert scored(made, made.row("1", chosen="2", rejected="3", margin=0.5))[0][1] == 0.5
    assert scored(made, made.row("1", chosen="2", rejected="3", margin=None))[0][1] == 0.0


def test_scores_in_a_chat_are_read_where_generation_ends(tmp_path: Path) -> None:
    made = Made(tmp_path, "algorithm.name=outcome_reward")
    ((text, label),) = scored(made, made.row("one", "two", label=True))
    assert text.endswith("<|im_start|>assistant\ntwo<|im_end|>")
    assert label == 1.0


def test_score_of_a_cut_answer_is_read_at_its_last_token(tmp_path: Path) -> None:
    made = Made(tmp_path, *PAIR_SCORES, "data.oversize=truncate_right", context=8)
    row = made.row("1234", chosen="56789", rejected="5")
    assert [text for text, _ in scored(made, row)] == ["12345678", "12345<|im_end|>"]


@pytest.mark.parametrize("margin", ["0.5", True, float("nan"), float("inf"), [1.0]])
def test_margin_that_is_no_number_is_refused(tmp_path: Path, margin: object) -> None:
    with pytest.raises(RowError, match="margin"):
        Made(tmp_path, *PAIR_SCORES).row("1", chosen="2", rejected="3", margin=margin)


@pytest.mark.parametrize(("label", "classes"), [(2, 1), (-1, 3), (3, 3), ("good", 2), (None, 2), (0.5, 2)])
def test_label_outside_the_classes_is_refused(tmp_path: Path, label: object, classes: int) -> None:
    made = Made(tmp_path, "algorithm.name=outcome_reward", f"algorithm.scores.classes={classes}")
    with pytest.raises(RowError, match=r"'label'.*algorithm\.scores\.classes"):
        made.row("one", "two", label=label)


def test_pair_of_equal_answers_has_no_scores(tmp_path: Path) -> None:
    made = Made(tmp_path, *PAIR_SCORES)
    with pytest.raises(RowError, match="the same"):
        made.row("1", chosen="2", rejected="2")


STEP_SCORES = ("algorithm.name=process_reward", "data.chat=false", "examples.step_separator=;")


def test_scores_of_steps_are_read_at_their_separators(tmp_path: Path) -> None:
    made = Made(tmp_path, *STEP_SCORES)
    expected = [("q:a;", 1.0), ("q:a;bc;", 0.0)]
    assert scored(made, made.row("q:", steps=["a", "bc"], labels=[True, False])) == expected
    assert scored(made, made.row("q:", "a;bc;", labels=[1, 0])) == expected
    assert scored(made, made.row("q:", "a;bc", labels=[1, 0])) == expected
    assert made.row("q:", "a;bc", labels=[1, 0]).texts == ["a;bc;"]


def test_steps_of_a_chat_are_those_of_its_last_answer(tmp_path: Path) -> None:
    made = Made(tmp_path, "algorithm.name=process_reward", "examples.step_separator=;")
    found = scored(made, made.row("a;b", "c;d;", labels=[True, False]))
    assert [(text.rpartition("assistant\n")[2], label) for text, label in found] == [("c;", 1.0), ("c;d;", 0.0)]


def test_steps_that_the_template_changes_are_refused(tmp_path: Path) -> None:
    trimming = SMOLLM2.replace("message['content']", "message['content'].strip()").replace(
        "m.content", "m.content.strip()"
    )
    made = Made(tmp_path, "algorithm.name=process_reward", template=trimming)
    with pytest.raises(RowError, match=r"template.*step_separator"):
        made.row("one", steps=["a", "b"], labels=[1, 1])


@pytest.mark.parametrize(
    ("answer", "fields", "said"),
    [
        ("abc", {"labels": [True]}, "no separator"),
        ("a;b", {"labels": [True]}, "2 steps and 1 labels"),
        ("a;b", {}, "labels"),
        ("a;b", {"labels": [True, 2]}, "label 2 of its steps"),
        ("", {"steps": ["a", "b;c"], "labels": [True, True]}, "separator.*inside"),
        ("", {"steps": "a;b", "labels": [True, True]}, "list of texts"),
    ],
)
def test_steps_without_a_score_each_are_refused(tmp_path: Path, answer: str, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(RowError, match=said):
        Made(tmp_path, *STEP_SCORES).row("q:", answer, **fields)


def test_labels_beyond_the_end_of_a_cut_answer_are_left_out(tmp_path: Path) -> None:
    made = Made(tmp_path, *STEP_SCORES, "data.oversize=truncate_right", context=6)
    row = made.row("q:", "a;bcd;", labels=[1, 0])
    assert scored(made, row) == [("q:a;", 1.0)]
