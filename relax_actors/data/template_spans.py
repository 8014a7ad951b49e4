"""Where the messages of a conversation are in the text that a chat template renders."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

from relax_actors.data.tokenizer import TemplateError, Tokenizer
from relax_actors.errors import RowError

Message = dict[str, Any]
Span = tuple[int, int]
_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


def has_generation_tags(template: str) -> bool:
    """Whether a chat template marks what the model writes with `{% generation %}`."""
    return _TAG.search(template) is not None


def tagged_spans(tokenizer: Tokenizer, messages: Sequence[Message], tools: object) -> tuple[str, list[Span | None]]:
    """Render a conversation by a template with generation tags.

    Returns:
        The text, and where the template marks the answer of each message; None for messages of other roles.

    Raises:
        RowError: the template refuses the messages, or marks more or fewer answers than there are.
    """
    from transformers.utils.chat_template_utils import render_jinja_template  # noqa: PLC0415 a second to import

    formatter = tokenizer.formatter
    try:
        texts, spans = cast("Any", render_jinja_template)(
            conversations=[list(messages)],
            tools=tools,
            chat_template=formatter.get_chat_template(None, tools),
            return_assistant_tokens_mask=True,
            **formatter.special_tokens_map,
        )
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error)[:300]}"
        msg = f"the chat template raised {reason}; correct the messages"
        raise TemplateError(msg, reason) from error
    marks = _joined(spans[0])
    marked = iter(marks)
    answers = sum(message["role"] == "assistant" for message in messages)
    if len(marks) != answers:
        msg = (
            f"the chat template marks {len(marks)} answers with {{% generation %}}, but the conversation has "
            f"{answers}; correct the template, or remove its tags"
        )
        raise RowError(msg)
    return str(texts[0]), [next(marked) if message["role"] == "assistant" else None for message in messages]


def _joined(marks: Sequence[Span]) -> list[Span]:
    """Join marks without text between them; some templates mark their end apart."""
    joined: list[Span] = []
    for begin, end in marks:
        if joined and joined[-1][1] == begin:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((begin, end))
    return joined


def message_spans(
    tokenizer: Tokenizer, messages: Sequence[Message], wanted: Sequence[bool], tools: object
) -> tuple[str, list[Span | None]]:
    """Render a conversation, and locate the text that each `wanted` message adds.

    An answer begins where the template asks the model for it.

    Returns:
        The text, and where each wanted message is; None for the others.

    Raises:
        RowError: the template refuses the messages, or writes earlier ones in another way once later ones follow.
    """
    whole, spans = tokenizer.chat(list(messages), asks=False, tools=tools), list[Span | None]()
    for i, (message, is_wanted) in enumerate(zip(messages, wanted, strict=True)):
        if not is_wanted:
            spans.append(None)
            continue
        asks = message["role"] == "assistant"
        before = tokenizer.chat(list(messages[:i]), asks=asks, tools=tools) if i else ""
        after = tokenizer.chat(list(messages[: i + 1]), asks=False, tools=tools)
        if not whole.startswith(after):  # some templates write the end of the text behind the last answer
            after = after.removesuffix(tokenizer.formatter.eos_token or "")
        if not after.startswith(before) or not whole.startswith(after):
            msg = (
                f"the chat template does not keep the beginning of a conversation as it is: it writes message {i + 1} "
                f"({message['role']}) or those before it in another way once others follow, so that its tokens cannot "
                'be told apart; use a template with {% generation %} tags, or examples.train = "completion"'
            )
            raise RowError(msg)
        spans.append((len(before), len(after)))
    return whole, spans
