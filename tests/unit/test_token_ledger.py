"""Which turns may begin: conversations that fit the key-value cache together, the oldest ones first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from relax_actors.training.token_ledger import TokenLedger


def test_a_waiting_conversation_keeps_its_place_in_the_cache() -> None:
    ledger = TokenLedger(None, 100)
    assert ledger.begin("a", 40)
    assert ledger.begin("b", 40)
    ledger.wait("a", 35)
    # 75 tokens are held: another conversation of 40 would push that of `a` out while its environment works.
    assert not ledger.begin("c", 40)
    assert ledger.begin("a", 50)
    ledger.end("b")
    assert ledger.begin("c", 40)


def test_the_youngest_conversation_waits_when_older_ones_have_grown() -> None:
    ledger = TokenLedger(None, 100)
    for name in "abc":
        assert ledger.begin(name, 30)
        ledger.wait(name, 30)
    assert ledger.oldest_first(["new", "c", "newer", "a"]) == ["a", "c", "new", "newer"]
    assert ledger.begin("a", 60)
    assert not ledger.begin("c", 35)
    assert ledger.begin("b", 40)
    ledger.end("a")
    assert ledger.begin("c", 35)


def test_the_limit_of_running_tokens_ignores_conversations_that_wait() -> None:
    ledger = TokenLedger(50, None)
    assert ledger.begin("a", 40)
    assert not ledger.begin("b", 20)
    ledger.wait("a", 40)
    assert ledger.begin("b", 20)
    assert ledger.begin("c", 30)
    assert not TokenLedger(None, None).has_limit


@given(st.integers(20, 200), st.lists(st.tuples(st.integers(0, 7), st.integers(1, 60)), max_size=120))
def test_running_turns_fit_and_something_always_runs(limit: int, steps: list[tuple[int, int]]) -> None:
    """Each step brings a turn of a conversation, or ends the one that it has."""
    ledger, running, tokens = TokenLedger(None, limit), dict[int, int](), dict[int, int]()
    for name, grows in steps:
        if name in running:
            tokens[name] = running.pop(name)
            if tokens[name] > limit:
                ledger.end(name)
                del tokens[name]
            else:
                ledger.wait(name, tokens[name])
            continue
        cost = tokens.get(name, 0) + grows
        idle = not running
        if ledger.begin(name, cost):
            running[name] = cost
            assert idle or sum(running.values()) <= limit
        else:
            assert not idle
