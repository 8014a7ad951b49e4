"""A client is asked to try again later if its long text has to wait for other texts."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from relax_actors.data.tokenizer import Tokenizer
from relax_actors.errors import SlowRowError
from relax_actors.serving.answers import Answers, Limits
from relax_actors.serving.ask import Ask
from relax_actors.serving.errors import ApiError
from tests.support.long_texts import byte_tokenizer, long_texts
from tests.support.scripted_policy import ScriptedPolicy


@pytest.mark.slow
def test_text_whose_turn_does_not_come_may_be_sent_again(tmp_path: Path) -> None:
    tokenizer = Tokenizer(byte_tokenizer(tmp_path, 1 << 24), turn_seconds=0.01)
    limits = Limits(max_body_bytes=1 << 24, max_concurrent=4, request_seconds=30.0)
    answers = Answers(ScriptedPolicy(tokenizer, str), tokenizer, "tiny", 1 << 24, limits)
    longer, text = (long_texts(size)["words"] for size in (4_000_000, 300_000))
    has_waited = threading.Event()

    def encode() -> None:
        while not has_waited.is_set():
            with suppress(SlowRowError):  # either of the two may come first
                tokenizer.encode(longer)

    others = threading.Thread(target=encode)
    others.start()
    try:
        with pytest.raises(ApiError) as found:
            while others.is_alive():
                asyncio.run(answers.prompts.tokens(Ask(prompt=text)))
    finally:
        has_waited.set()
        others.join()
    assert (found.value.status, found.value.headers()) == (503, {"Retry-After": "1"})
    assert "others have taken" in found.value.message
