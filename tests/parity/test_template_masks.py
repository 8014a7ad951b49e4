"""Which tokens of a conversation are trained, on the chat templates of published models, as TRL has them.

TRL marks answers with `{% generation %}` in its training templates. Without marks, the same tokens are found as what
each answer adds to the conversation before it.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

from relax_actors.data.template_spans import has_generation_tags
from relax_actors.errors import RowError
from tests.parity.test_templates import STOPS
from tests.unit.data.test_rows_of_data import TALK, Made

pytest.importorskip("trl")


HEADED = {
    "qwen3": "<think>\n\n</think>\n\n",
    "qwen3_6": "<think>\n\n</think>\n\n",
    "deepseekv3": "<｜Assistant｜>",  # noqa: RUF001 as the model spells it
}
"""What TRL's training templates mark before the text of an answer; without marks, they ask for an answer in another way
than they write it."""


def made(name: str, folder: Path) -> Made:
    template = (files("trl") / "chat_templates" / f"{name}.jinja").read_text()
    return Made(folder, "examples.train=['assistant']", template=template, stops=STOPS[name.removesuffix("_training")])


def has_training_template(name: str) -> bool:
    return (files("trl") / "chat_templates" / f"{name}_training.jinja").is_file()


@pytest.mark.parametrize("name", [name for name in STOPS if has_training_template(name)])
def test_answers_found_by_prefixes_are_those_that_tags_mark(name: str, tmp_path: Path) -> None:
    tagged, plain = made(f"{name}_training", tmp_path / "tagged"), made(name, tmp_path / "plain")
    assert has_generation_tags(tagged.tokenizer.chat_template)
    assert not has_generation_tags(plain.tokenizer.chat_template)
    stop, head = STOPS[name][0], HEADED.get(name, "")
    expected = [f"two{stop}", f"four{stop}"]
    assert [text.strip() for text in tagged.trained(TALK)] == [head + text for text in expected]
    if head:
        with pytest.raises(RowError, match="does not keep the beginning"):
            plain.trained(TALK)
    else:
        assert [text.strip() for text in plain.trained(TALK)] == expected
