"""Tool loops with the rules of Mistral's chat templates: in environments, and of agents."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import numpy as np
import pytest

from broker.subjects import RowId
from relax_actors.data.renderer import Renderer
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.data.tool_call import ToolFormat
from relax_actors.engines.protocols import Generation
from relax_actors.envs import Step
from relax_actors.envs.observation import answer_of
from relax_actors.envs.tools import ToolEnvironment
from relax_actors.messages import FinishReason
from relax_actors.sessions.conversation import ChatConversation
from relax_actors.sessions.dialogue import Dialogue, answer_message
from relax_actors.sessions.episode import Episode
from relax_actors.sessions.episode_start import Limits, Start
from tests.support.chat_folder import make_chat_folder
from tests.support.chat_templates import MISTRAL, SMOLLM2
from tests.support.messages import assert_says

ASKED = [{"role": "user", "content": "6+7?"}]
ADD = '[TOOL_CALLS][{"name": "add", "arguments": {"a": 6, "b": 7}}]'
NAMED = '[TOOL_CALLS][{"name": "add", "arguments": {"a": 6, "b": 7}, "id": "Ab3dEf9hI"}]'
MALFORMED = '[TOOL_CALLS][{"name": "add"'


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class Adds(ToolEnvironment):
    """Adds."""

    tools = (add,)
    tool_format = ToolFormat.MISTRAL


TOOLS = Adds.tool_schemas({})


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer(make_chat_folder(tmp_path, MISTRAL, ["</s>"]))


def test_tool_loop_of_an_environment_is_one_sequence(tokenizer: Tokenizer) -> None:
    conversation, environment = ChatConversation(tokenizer, TOOLS, branches=False), Adds()
    assert environment.reset({}, np.random.default_rng()) == ""
    episode = Episode(Start(RowId(0, 0), 0, 1, conversation.prompt(ASKED), ASKED), Limits(9, 500, 9000), conversation)
    episode.step(answer_of("", "s", -1, 9999))
    texts = [ADD, NAMED, ADD, "13"]
    for number, said in enumerate(texts):
        tokens = tokenizer.encode(f"{said}</s>", special=False)
        zeros = np.zeros(len(tokens), np.float32)
        episode.say(Generation(tokens, zeros, zeros.astype(np.int32), FinishReason.STOP))
        episode.step(answer_of(asyncio.run(environment.step(episode.actions[-1])), "s", number, 9999))
    (sequence,) = episode.sample().sequences
    assert tokenizer.spell(sequence.token_ids[sequence.loss_mask]) == "</s>".join(texts)
    results = re.findall(r'"content": (\w+), "call_id": "([A-Za-z0-9]{9})"', tokenizer.spell(sequence.token_ids))
    assert [content for content, _ in results] == ["13"] * 3
    assert results[1][1] == "Ab3dEf9hI", "the id that the model wrote"


def test_malformed_call_is_answered_in_a_role_that_the_template_takes(tokenizer: Tokenizer) -> None:
    conversation, environment = ChatConversation(tokenizer, TOOLS), Adds()
    environment.reset({}, np.random.default_rng())
    result = asyncio.run(environment.step(MALFORMED))
    assert isinstance(result, Step)
    (message,) = answer_of(result, "s", 0, 9999).messages
    assert message["role"] == "user"
    whole = [*ASKED, {"role": "assistant", "content": MALFORMED}, message]
    assert f"{MALFORMED}</s>" in tokenizer.spell(conversation.prompt(whole))


def test_tool_loop_of_an_agent_is_one_sequence(tokenizer: Tokenizer) -> None:
    dialogue, messages = Dialogue(tokenizer), list(ASKED)
    tokens = dialogue.prompt(messages, TOOLS, {})
    for number in range(3):
        answer = tokenizer.encode(f"{ADD}</s>", special=False)
        message = answer_message(dialogue.parse(tokens, answer, TOOLS), f"call {number}")
        new = [{"role": "tool", "tool_call_id": call["id"], "content": "13"} for call in message["tool_calls"]]
        extension = dialogue.extension(messages, answer, new, TOOLS, {})
        assert extension.is_faithful, extension.change
        tokens = np.concatenate([tokens, answer, extension.token_ids])
        messages += [message, *new]
    ids = re.findall(r'"call_id": "([A-Za-z0-9]{9})"', tokenizer.spell(tokens))
    assert len(set(ids)) == 3


@pytest.mark.parametrize(("template", "stop"), [(MISTRAL, "</s>"), (SMOLLM2, "<|im_end|>")])
def test_user_turns_continue_a_conversation_without_tools(tmp_path: Path, template: str, stop: str) -> None:
    tokenizer = Tokenizer(make_chat_folder(tmp_path, template, [stop]))
    renderer, messages = Renderer(tokenizer), list(ASKED)
    tokens = renderer.prompt(messages)
    for ending in (stop, "", stop):  # the second answer ends at a stop string
        answer, new = tokenizer.encode(f"13{ending}", special=False), [{"role": "user", "content": "more"}]
        extension = renderer.extend(messages, answer, new)
        assert extension.is_faithful, extension.change
        tokens = np.concatenate([tokens, answer, extension.token_ids])
        messages += [{"role": "assistant", "content": "13"}, *new]
    np.testing.assert_array_equal(tokens, renderer.prompt(messages))


def test_tools_that_the_template_moves_to_the_last_user_message_are_told(tokenizer: Tokenizer) -> None:
    answer = tokenizer.encode("13</s>", special=False)
    extension = Dialogue(tokenizer).extension(ASKED, answer, [{"role": "user", "content": "more"}], TOOLS, {})
    assert_says(extension.change, "rewrites", "last answer")
