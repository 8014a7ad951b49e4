"""Episodes with a chat template: how a turn ends, and which tokens close it."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.subjects import RowId
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.errors import RowError
from relax_actors.messages import EnvironmentAnswer
from relax_actors.sessions.conversation import ChatConversation
from relax_actors.sessions.episode import Episode
from relax_actors.sessions.episode_start import Limits, Start
from tests.support.chat_folder import make_chat_folder
from tests.support.messages import assert_says
from tests.unit.test_episode import answer, say

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASKED = [{"role": "user", "content": "6+7?"}]
RESULT = [{"role": "user", "content": "13"}]


def chat_episode(tokenizer: Tokenizer, said: str, *, branches: bool = True) -> Episode:
    """Return an episode by chat template whose first turn was `said`."""
    conversation = ChatConversation(tokenizer, branches=branches)
    one = Episode(Start(RowId(0, 0), 0, 1, conversation.prompt(ASKED), ASKED), Limits(4, 500, 4000), conversation)
    one.step(answer(turn=-1))
    say(one, tokenizer.encode(said, special=False))
    return one


def test_turn_that_ended_at_a_stop_string_is_closed_by_a_token_that_is_not_trained(tmp_path: Path) -> None:
    tokenizer = Tokenizer(make_chat_folder(tmp_path, CHAT, ["<|im_end|>", "<|endoftext|>"]))
    call = "<tool_call>add</tool_call>"
    one = chat_episode(tokenizer, call, branches=False)
    one.step(EnvironmentAnswer("s", 0, RESULT))
    whole = [*ASKED, {"role": "assistant", "content": call}, *RESULT]
    assert tokenizer.spell(one.tokens) == tokenizer.chat(whole)
    assert one.branches == 0
    (sequence,) = one.sample().sequences
    assert tokenizer.spell(sequence.token_ids[sequence.loss_mask]) == call


def test_turn_that_ended_with_another_stop_token_branches_or_ends_the_sample(tmp_path: Path) -> None:
    tokenizer = Tokenizer(make_chat_folder(tmp_path, CHAT, ["<|im_end|>", "<|endoftext|>"]))
    one = chat_episode(tokenizer, "13<|endoftext|>")
    one.step(EnvironmentAnswer("s", 0, RESULT))
    whole = [*ASKED, {"role": "assistant", "content": "13"}, *RESULT]
    assert tokenizer.spell(one.tokens) == tokenizer.chat(whole)
    assert one.branches == 1
    strict = chat_episode(tokenizer, "13<|endoftext|>", branches=False)
    with pytest.raises(RowError) as error:
        strict.step(EnvironmentAnswer("s", 0, RESULT))
    assert_says(error.value, "chat template", "'<|im_end|>'", "'<|endoftext|>'", "environment.on_rewrite")
