"""Requests of the gateway in batches: which ones begin, and when they join."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np

from relax_actors.engines.protocols import Generation, GenerationRequest
from relax_actors.engines.protocols.guests import (
    GUESTS,
    JOIN_SHARE,
    JOIN_TOKENS,
    Guest,
    Guests,
    InFlight,
    JoinPace,
)
from relax_actors.errors import RelaxError
from relax_actors.messages import FinishReason
from relax_actors.roles.guest_batches import GuestBatches
from relax_actors.simulation.inference import SimulatedInference
from relax_actors.training.token_ledger import TokenLedger
from relax_actors.weights.stager import Stager
from tests.support.simulated import simulated_devices

Answers = list[Generation | RelaxError]


def asking(tokens: int, seed: int = 0) -> GenerationRequest:
    """Ask for one sample that needs so many tokens at most, its prompt of one token included."""
    return GenerationRequest(np.ones(1, np.int32), seed, 1, 1.0, 1.0, tokens - 1, frozenset())


def waiting(*tokens: int) -> tuple[Guests, Answers]:
    guests, answers = Guests(), list[Generation | RelaxError]()
    for needed in tokens:
        guests.add(Guest(asking(needed), answers.append))
    return guests, answers


def ending(*numbers: int) -> list[tuple[int, list[Generation]]]:
    empty = np.zeros(0, np.int32)
    return [(number, [Generation(empty, empty, empty, FinishReason.STOP)]) for number in numbers]


def batches(folder: Path, most_tokens: int | None, *, limit: int = GUESTS, is_alone: bool = False) -> GuestBatches:
    config, devices = simulated_devices(folder)
    assert config.simulate is not None
    engine = SimulatedInference(devices, 0, 1000, rows=100)
    engine.stage(0, {})
    engine.swap()
    nothing = cast("Stager", None)  # batches of a version swap no weights
    return GuestBatches(engine, nothing, lambda: None, limit, most_tokens, is_alone=is_alone, updates_in_flight=False)


def test_many_requests_join_at_once_and_few_ones_together() -> None:
    pace = JoinPace(joins_freely=False)
    # One request for a batch of 16 waits; two are an eighth of it.
    assert [pace.step(1, 2 * JOIN_SHARE) for _ in range(JOIN_TOKENS)] == [False] * (JOIN_TOKENS - 1) + [True]
    assert pace.step(2, 2 * JOIN_SHARE)
    assert not pace.step(0, 1)
    assert JoinPace(joins_freely=True).step(1, 1000)


def test_guests_begin_while_all_requests_in_flight_fit_or_none_is_in_flight() -> None:
    guests, answers = waiting(30, 40, 20)
    running = InFlight()
    running.add([(asking(90), "row")])
    fits = running.fits(130)
    assert running.invitable(guests, GUESTS, fits) == 1
    assert [request.most_tokens for request in running.invite(guests, GUESTS, fits)] == [30]
    assert running.guest_tokens == 30
    assert running.invitable(guests, GUESTS, fits) == 0
    assert running.invite(guests, GUESTS, fits) == []
    assert running.take(ending(1)) == []
    assert len(answers) == 1
    # No guest is in flight: the oldest one begins, although it does not fit beside the row. The other one waits.
    assert len(running.invite(guests, GUESTS, running.fits(100))) == 1
    assert len(running.take(ending(0, 2))) == 1
    assert len(running.invite(guests, GUESTS, running.fits(None))) == 1
    running.dismiss()
    assert running.guest_tokens == 0
    assert str(answers[-1]) == "generation has ended before the sample; send the request again"


def test_no_more_guests_count_as_waiting_than_may_be_in_flight(tmp_path: Path) -> None:
    few, alone = batches(tmp_path, None, limit=2), batches(tmp_path, None, is_alone=True)
    for _ in range(5):
        for one in (few, alone):
            one.waiting.add(Guest(asking(10), lambda _: None))
    running = InFlight()
    assert few.invitable(running) == 2
    assert len(few.invite(running)) == 2
    assert few.invitable(running) == 0
    assert alone.invitable(InFlight()) == 0
    assert alone.invite(InFlight()) == []


def test_guests_are_answered_in_batches_that_fit(tmp_path: Path) -> None:
    one = batches(tmp_path, 60)
    sizes, answers = list[int](), list[Generation | RelaxError]()
    for n, tokens in enumerate((20, 30, 200, 20, 20)):
        one.waiting.add(Guest(asking(tokens, n), answers.append))
    while one.waiting:
        before = len(answers)
        for _ in one.answer(0, lambda: False):
            pass
        sizes.append(len(answers) - before)
    assert all(isinstance(answer, Generation) for answer in answers)
    assert sizes == [2, 1, 2]


def test_turns_and_guests_count_one_cache() -> None:
    guests, _ = waiting(*[20] * 10)
    running = InFlight()
    ledger = TokenLedger(None, 100, lambda: running.guest_tokens)
    for number, name in enumerate("abc"):
        assert ledger.begin(name, 20)
        running.add([(asking(20), name)])
        running.take(ending(number))
        ledger.wait(name, 20)  # its environment works: the engine does not, but its cache holds 20 tokens
    assert running.invitable(guests, GUESTS, ledger.guest_fits) == 2
    assert len(running.invite(guests, GUESTS, ledger.begin_guest)) == 2, "60 tokens wait, 40 are free"
    assert not ledger.begin("d", 20)
    assert ledger.begin("a", 20), "it has its place"
    assert not ledger.begin("b", 41)
