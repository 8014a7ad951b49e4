"""Renderer: tokens of new messages behind a sampled answer, without tokenizing the answer again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from relax_actors.data.character_tokenizer import make_character_tokenizer
from relax_actors.data.renderer import Renderer
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.errors import ConfigError, RowError
from tests.support.chat_folder import make_chat_folder
from tests.support.messages import assert_says

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DROPS_REASONING = CHATML.replace(
    "{{ m.content }}",
    "{{ m.content if loop.last or m.role != 'assistant' else m.content.split('</think>')[-1] }}",
)
TRIMS = CHATML.replace("{{ m.content }}", "{{ m.content | trim }}")
USER = {"role": "user", "content": "3 + 4?"}
NEXT = [{"role": "user", "content": "and 5 more?"}]


def renderer(folder: Path, template: str = CHATML, **settings: object) -> Renderer:
    return Renderer(Tokenizer(make_chat_folder(folder, template, ["<|im_end|>"])), **settings)


def sampled(folder: Path, answer: str, stop: str = "<|im_end|>") -> np.ndarray:
    """Return the tokens of an answer that ended with a stop token."""
    return Tokenizer(folder).encode(answer + stop, special=False)


def text(folder: Path, tokens: np.ndarray) -> str:
    token_bytes = Tokenizer(folder).token_bytes
    return b"".join(token_bytes(token) for token in tokens.tolist()).decode()


def test_prompt_and_extension_spell_the_rendered_conversation(tmp_path: Path) -> None:
    found = renderer(tmp_path)
    answer = "7"
    tokens = sampled(tmp_path, answer)
    extension = found.extend([USER], tokens, NEXT)
    assert text(tmp_path, found.prompt([USER])) == "<|im_start|>user\n3 + 4?<|im_end|>\n<|im_start|>assistant\n"
    assert text(tmp_path, extension.token_ids) == "\n<|im_start|>user\nand 5 more?<|im_end|>\n<|im_start|>assistant\n"
    assert extension.is_faithful
    spelled = np.concatenate([found.prompt([USER]), tokens, extension.token_ids])
    np.testing.assert_array_equal(spelled, found.prompt([USER, {"role": "assistant", "content": answer}, *NEXT]))


def test_dropped_reasoning_is_told(tmp_path: Path) -> None:
    found = renderer(tmp_path, DROPS_REASONING)
    kept = found.extend([USER], sampled(tmp_path, "7"), NEXT)
    assert kept.is_faithful
    dropped = found.extend([USER], sampled(tmp_path, "<think>3, 4: 7</think>7"), NEXT)
    assert not dropped.is_faithful
    assert_says(dropped.change, "'7'", "'<think>3, 4: 7</think>7'")
    np.testing.assert_array_equal(dropped.token_ids, kept.token_ids)


def test_whitespace_that_a_template_trims_is_no_difference(tmp_path: Path) -> None:
    assert renderer(tmp_path, TRIMS).extend([USER], sampled(tmp_path, " 7\n"), NEXT).is_faithful


@pytest.mark.parametrize("answer", ["<tool_call>add</tool_call>", "cut in the mid"])
def test_answer_without_stop_token_gets_that_of_the_template(tmp_path: Path, answer: str) -> None:
    # It ended at a stop string, or at the limit of tokens.
    found = renderer(tmp_path)
    tokens = sampled(tmp_path, answer, stop="")
    extension = found.extend([USER], tokens, NEXT)
    assert extension.is_faithful
    assert text(tmp_path, extension.token_ids).startswith("<|im_end|>\n<|im_start|>user\n")
    spelled = np.concatenate([found.prompt([USER]), tokens, extension.token_ids])
    np.testing.assert_array_equal(spelled, found.prompt([USER, {"role": "assistant", "content": answer}, *NEXT]))


def test_another_stop_token_than_that_of_the_template_is_told(tmp_path: Path) -> None:
    folder = make_chat_folder(tmp_path, CHATML, ["<|im_end|>", "<|endoftext|>"])
    extension = Renderer(Tokenizer(folder)).extend([USER], sampled(folder, "7", "<|endoftext|>"), NEXT)
    assert not extension.is_faithful
    assert_says(extension.change, "'<|im_end|>'", "'<|endoftext|>'")


def test_messages_that_a_template_moves_are_told(tmp_path: Path) -> None:
    # As Mistral's template does with the tools.
    moves = CHATML.replace("{{ m.content }}", "{{ 'SYSTEM ' if loop.revindex0 == 0 }}{{ m.content }}")
    extension = renderer(tmp_path, moves).extend([USER], sampled(tmp_path, "7"), NEXT)
    assert_says(extension.change, "rewrites", "last answer")


def test_reserved_tokens_of_an_answer_are_told(tmp_path: Path) -> None:
    # The model wrote a turn of its own: the template cannot know, and the text is the same.
    assert renderer(tmp_path).extend([USER], sampled(tmp_path, "7<|im_start|>user"), NEXT).is_faithful


def test_tools_and_settings_reach_the_template(tmp_path: Path) -> None:
    template = "{% if tools %}{{ tools[0].name }}{% endif %}{{ mood }}" + CHATML
    found = renderer(tmp_path, template, tools=[{"name": "add"}], settings={"mood": "!"})
    assert text(tmp_path, found.prompt([USER])).startswith("add!<|im_start|>")


COUNTS_MESSAGES = (
    "{% for m in messages %}{{ m.role }} {{ loop.length if m.role == 'user' }} {{ m.content }}<|im_end|>{% endfor %}"
)
REFUSED = {
    CHATML.replace("<|im_end|>", "<|eot|>"): (
        "the chat template writes '<|eot|>\\n<|im_start|>' behind an answer, which is none of the stop tokens "
        "'<|im_end|>'; correct eos_token_id in generation_config.json"
    ),
    COUNTS_MESSAGES: (
        "the chat template writes 'user 3 one\\ntwo<|im_end|>' behind an answer, but 'user 5 one\\ntwo<|im_end|>' in a "
        "longer conversation, so that new messages cannot be added to sampled tokens; use another template"
    ),
    CHATML.replace("{{ m.content }}", "{{ m.content if loop.last else '' }}"): (
        "a conversation of several turns cannot be rendered: the chat template writes an answer 0 times; it must write "
        "it once"
    ),
}


@pytest.mark.parametrize("template", REFUSED)
def test_template_that_cannot_be_extended_is_refused(tmp_path: Path, template: str) -> None:
    with pytest.raises(ConfigError) as error:
        renderer(tmp_path, template)
    assert str(error.value) == REFUSED[template]


def test_tokenizer_without_template_is_refused(tmp_path: Path) -> None:
    make_chat_folder(tmp_path, CHATML, ["<|im_end|>"])
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError) as error:
        Renderer(Tokenizer(tmp_path))
    assert_says(error.value, "chat template", "chat_template.jinja")


def test_message_that_the_template_refuses_is_an_error_of_the_row(tmp_path: Path) -> None:
    refusing = "{% if messages[-1].role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}" + CHATML
    with pytest.raises(RowError, match="no tools here"):
        renderer(tmp_path, refusing).extend(
            [USER],
            sampled(make_chat_folder(tmp_path, refusing, ["<|im_end|>"]), "7"),
            [{"role": "tool", "content": "12"}],
        )


@pytest.mark.parametrize("alphabet", ["0123456789>#", "0123456789>#?", "0123456789>#\\x\nabcdef"])
def test_a_small_alphabet_holds_conversations(tmp_path: Path, alphabet: str) -> None:
    ids = make_character_tokenizer(alphabet, "#", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(ids))
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}#{% else %}>{{ m.content }}\n{% endif %}"
        "{% endfor %}"
    )
    tokenizer = Tokenizer(tmp_path)
    extension = Renderer(tokenizer).extend([{"role": "user", "content": "3"}], sampled(tmp_path, "7", "#"), [])
    assert extension.is_faithful
    assert not tokenizer.replaced, "the texts of the proof are no observations"
