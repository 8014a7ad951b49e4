"""Texts of megabytes: refused by their length, or tokenized while the other threads of the process go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from relax_actors.data.time_limit import call_within
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.errors import SlowRowError, TooLongError
from tests.support.long_texts import byte_tokenizer, long_texts

TEXTS = long_texts(600_000)
SILENT_SHARE = 0.8
"""Part of the time for which no other thread runs; with `encode` of the library it is all of it."""


def longest_silence(work: Callable[[], object]) -> float:
    """Return the longest time in which a thread did not run while another one did some work, as a part of all."""
    beats, done = [time.monotonic()], threading.Event()

    def beat() -> None:
        while not done.wait(0.01):
            beats.append(time.monotonic())

    thread = threading.Thread(target=beat)
    thread.start()
    work()
    done.set()
    thread.join()
    beats.append(time.monotonic())
    return max(later - earlier for earlier, later in pairwise(beats)) / (beats[-1] - beats[0])


@pytest.mark.parametrize("name", TEXTS)
def test_long_text_is_tokenized_while_other_threads_go_on(tmp_path: Path, name: str) -> None:
    tokenizer = Tokenizer(byte_tokenizer(tmp_path, 1 << 20))
    tokens = []
    assert longest_silence(lambda: tokens.append(tokenizer.encode(TEXTS[name]))) < SILENT_SHARE
    assert tokenizer.decode(tokens[0]) == TEXTS[name]


@pytest.mark.parametrize("name", TEXTS)
def test_text_that_no_context_holds_is_refused_before_it_is_tokenized(tmp_path: Path, name: str) -> None:
    tokenizer = Tokenizer(byte_tokenizer(tmp_path, 4096))
    began = time.thread_time()
    with pytest.raises(TooLongError) as found:
        tokenizer.encode(TEXTS[name])
    assert time.thread_time() - began < 0.2
    size = len(TEXTS[name].encode())
    assert all(part in str(found.value) for part in (f"{size} bytes", str(4096 * len("hello")), "context of 4096"))


@pytest.mark.slow
def test_text_that_is_given_up_while_it_waits_does_not_keep_the_turn(tmp_path: Path) -> None:
    tokenizer = Tokenizer(byte_tokenizer(tmp_path, 1 << 24), turn_seconds=20)
    text = "hello world, this is 1 test; " * 40_000
    before = threading.Thread(target=tokenizer.encode, args=(text * 3,))
    before.start()
    with pytest.raises(TimeoutError):
        call_within(0.05, lambda: tokenizer.encode(text))
    before.join()
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.slow
def test_text_whose_turn_does_not_come_says_so(tmp_path: Path) -> None:
    tokenizer = Tokenizer(byte_tokenizer(tmp_path, 1 << 24), turn_seconds=0.01)
    text = "hello world, this is 1 test; " * 40_000
    before = threading.Thread(target=tokenizer.encode, args=(text * 3,))
    before.start()
    try:
        with pytest.raises(SlowRowError, match="others have taken"):
            while before.is_alive():
                tokenizer.encode(text)
    finally:
        before.join()


def test_longest_text_that_may_fit_is_tokenized(tmp_path: Path) -> None:
    tokenizer = Tokenizer(byte_tokenizer(tmp_path, 3))
    assert tokenizer.encode("hellohellohello").tolist() == [259, 259, 259]
    with pytest.raises(TooLongError):
        tokenizer.encode("hellohellohelloh")
