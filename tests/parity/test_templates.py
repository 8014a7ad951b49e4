"""Renderer on the chat templates of published models, as TRL has them."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

from relax_actors.data.renderer import Renderer
from relax_actors.data.tokenizer import Tokenizer
from tests.support.chat_folder import make_chat_folder

pytest.importorskip("trl")

IM_END, LLAMA = ("<|im_end|>",), ("<|eot_id|>",)
STOPS = {
    "qwen2_5": IM_END,
    "qwen3": IM_END,
    "qwen3_instruct_2507": IM_END,
    "qwen3_vl": IM_END,
    "qwen2_5_vl": IM_END,
    "qwen3_6": IM_END,
    "llama3": LLAMA,
    "llama3_1": LLAMA,
    "llama3_2": LLAMA,
    "gemma": ("<end_of_turn>",),
    "gemma3": ("<end_of_turn>",),
    "phi3": ("<|end|>",),
    "lfm2": IM_END,
    "deepseekv3": ("<｜end▁of▁sentence｜>",),  # noqa: RUF001 as the model spells it
}
DROP_REASONING = ("qwen3", "qwen3_6")
REASON_FIRST = ("qwen3_6", "deepseekv3")
"""An answer begins with reasoning, which these templates drop from earlier answers, or with the end of it."""


def renderer(name: str, folder: Path) -> Renderer:
    template = (files("trl") / "chat_templates" / f"{name}.jinja").read_text()
    return Renderer(Tokenizer(make_chat_folder(folder, template, STOPS[name])))


@pytest.mark.parametrize("name", STOPS)
def test_extension_spells_what_the_template_renders(name: str, tmp_path: Path) -> None:
    found = renderer(name, tmp_path)
    history = [{"role": "user", "content": "3 + 4?"}]
    for turn in range(3):
        new = [{"role": "user", "content": f"and {turn} more?"}]
        extension = found.extend(history, f"it is {turn}", new)
        assert extension.is_faithful == (name not in REASON_FIRST)
        assert len(extension.token_ids)
        history += [{"role": "assistant", "content": f"it is {turn}"}, *new]


@pytest.mark.parametrize("name", DROP_REASONING)
def test_reasoning_that_the_template_drops_is_told(name: str, tmp_path: Path) -> None:
    found = renderer(name, tmp_path)
    asked, reasoned = [{"role": "user", "content": "3 + 4?"}], "<think>\nseven\n</think>\n\n7"
    assert not found.extend(asked, reasoned, [{"role": "user", "content": "more?"}]).is_faithful
