"""Renderer on the chat templates of published models, as TRL has them."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import numpy as np
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
    found, tokenizer = renderer(name, tmp_path), Tokenizer(tmp_path)
    history = [{"role": "user", "content": "3 + 4?"}]
    tokens = found.prompt(history)
    for turn in range(3):
        new = [{"role": "user", "content": f"and {turn} more?"}]
        # The second answer ends at a stop string.
        answer = tokenizer.encode(f"it is {turn}{'' if turn == 1 else STOPS[name][0]}", special=False)
        extension = found.extend(history, answer, new)
        assert extension.is_faithful == (name not in REASON_FIRST), extension.change
        tokens = np.concatenate([tokens, answer, extension.token_ids])
        history += [{"role": "assistant", "content": f"it is {turn}"}, *new]
    if name not in REASON_FIRST:
        np.testing.assert_array_equal(tokens, found.prompt(history))


@pytest.mark.parametrize("name", DROP_REASONING)
def test_reasoning_that_the_template_drops_is_told(name: str, tmp_path: Path) -> None:
    found, tokenizer = renderer(name, tmp_path), Tokenizer(tmp_path)
    reasoned = tokenizer.encode("<think>\nseven\n</think>\n\n7<|im_end|>", special=False)
    asked = [{"role": "user", "content": "3 + 4?"}]
    assert not found.extend(asked, reasoned, [{"role": "user", "content": "more?"}]).is_faithful


def test_qwen3_keeps_reasoning_while_tools_work(tmp_path: Path) -> None:
    found, tokenizer = renderer("qwen3", tmp_path), Tokenizer(tmp_path)
    call = '<think>\nadd\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>'
    history = [{"role": "user", "content": "3 + 4?"}]
    for _ in range(3):
        new = [{"role": "tool", "content": "7"}]
        extension = found.extend(history, tokenizer.encode(f"{call}<|im_end|>", special=False), new)
        assert extension.is_faithful, extension.change
        history += [{"role": "assistant", "content": call}, *new]


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_instruct_2507"])
def test_second_stop_token_of_qwen_is_told(name: str, tmp_path: Path) -> None:
    template = (files("trl") / "chat_templates" / f"{name}.jinja").read_text()
    tokenizer = Tokenizer(make_chat_folder(tmp_path, template, ["<|im_end|>", "<|endoftext|>"]))
    answer = tokenizer.encode("7<|endoftext|>", special=False)
    asked, more = [{"role": "user", "content": "3 + 4?"}], [{"role": "user", "content": "more?"}]
    extension = Renderer(tokenizer).extend(asked, answer, more)
    assert extension.change == "it ends an answer with '<|im_end|>', the model with '<|endoftext|>'"
