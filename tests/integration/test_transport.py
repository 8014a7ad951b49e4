"""Weights from memory to memory between real processes; whatever goes wrong, the files lead to the same bits."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from relax_actors.errors import ConfigError
from relax_actors.weights.protocol import Content
from relax_actors.weights.torch_transport import wire
from relax_actors.weights.torch_transport.pair import RECEIVER, Pair, open_store
from relax_actors.weights.torch_transport.receiver import TorchReceiver, TransportError
from relax_actors.weights.torch_transport.sender import Address, TorchSender, knock
from relax_actors.weights.transport import NOTE
from tests.integration.conftest import MakeContext
from tests.integration.test_weights import DELTAS, Receiver, Sender
from tests.support.running import wait_until
from tests.support.sending import OFFERED, content, sending

TORCH = (*DELTAS, "weights.transport=torch", "weights.patience=5")
MOST = 1 << 30
LARGE = 256


class Fetch(threading.Thread):
    """A call of `fetch` under way; what came of it, and the seconds that it took."""

    def __init__(self, seconds: float, address: Address) -> None:
        super().__init__()
        self.receiver, self.address = TorchReceiver(seconds), address
        self.found: Content | TransportError | None = None
        self.start()

    def run(self) -> None:
        began = time.monotonic()
        try:
            self.found = self.receiver.fetch(self.address, OFFERED, "", MOST)
        except TransportError as error:
            self.found = error
        self.seconds = time.monotonic() - began

    def in_the_middle(self) -> None:
        """Wait until a part has come."""
        wait_until(lambda: self.receiver.exchange is not None and self.receiver.exchange.nbytes, "first bytes")

    def end(self) -> Content | TransportError | None:
        self.join(120)
        assert not self.is_alive()
        return self.found


@pytest.fixture
def sender() -> Iterator[TorchSender]:
    made = TorchSender("127.0.0.1", 10.0)
    yield made
    made.close()


def same(found: Content | TransportError | None, tensors: Any) -> bool:
    assert isinstance(found, Content), found
    assert list(found.tensors) == list(tensors)
    return all(torch.equal(found.tensors[name], tensor) for name, tensor in tensors.items())


def test_tensors_come_from_another_process_as_often_as_they_are_asked_for() -> None:
    with sending(20) as (_, address):
        receiver = TorchReceiver(60.0)
        for _ in range(3):
            assert same(receiver.fetch(address, OFFERED, "", MOST), content(20).tensors)
        assert receiver.fetch(address, "a" * 32, "", MOST) is None
        with pytest.raises(TransportError, match="are on offer"):
            receiver.fetch(address, OFFERED, "", 1 << 20)
        assert same(receiver.fetch(address, OFFERED, "", MOST), content(20).tensors)
        receiver.close()


def test_a_delta_goes_to_whom_it_applies_and_all_to_others(sender: TorchSender) -> None:
    base, delta, whole = "b" * 32, {"w:gaps": torch.arange(9)}, {"w": torch.arange(100.0)}
    sender.offer(OFFERED, [Content(base, delta), Content(None, whole)])
    receiver = TorchReceiver(60.0)
    found = receiver.fetch(sender.address, OFFERED, base, MOST)
    assert same(found, delta)
    assert found is not None
    assert found.base == base
    assert same(receiver.fetch(sender.address, OFFERED, "c" * 32, MOST), whole)
    assert same(receiver.fetch(sender.address, OFFERED, "", MOST), whole)
    receiver.close()


def test_many_come_and_go(sender: TorchSender) -> None:
    tensors = {"w": torch.arange(1000.0)}
    sender.offer(OFFERED, [Content(None, tensors)])
    for _ in range(3):
        fetches = [Fetch(60.0, sender.address) for _ in range(6)]
        assert all(same(fetch.end(), tensors) for fetch in fetches)
        for fetch in fetches:
            fetch.receiver.close()
    wait_until(lambda: not sender._peers, "end of all connections")


def test_a_sender_killed_in_mid_transfer_is_told_at_once() -> None:
    with sending(LARGE) as (child, address):
        fetch = Fetch(100.0, address)
        fetch.in_the_middle()
        child.send_signal(signal.SIGSTOP)
        child.kill()
        assert isinstance(fetch.end(), TransportError)
        assert fetch.seconds < 50
        # What still hangs of it must not keep one from the next life of the sender.
        with sending(1) as (_, other):
            assert same(fetch.receiver.fetch(other, OFFERED, "", MOST), content(1).tensors)
            fetch.receiver.close()
        with pytest.raises(TransportError, match="refused"):
            TorchReceiver(100.0).fetch(address, OFFERED, "", MOST)


def test_a_sender_stopped_in_mid_transfer_holds_nobody_over_the_deadline() -> None:
    with sending(LARGE) as (child, address):
        fetch = Fetch(3.0, address)
        fetch.in_the_middle()
        child.send_signal(signal.SIGSTOP)
        assert isinstance(fetch.end(), TransportError)
        assert fetch.seconds < 10
        # Now where not even a connection comes about.
        began = time.monotonic()
        with pytest.raises(TransportError):
            wait_until(lambda: not fetch.receiver.fetch(address, OFFERED, "", MOST), "never")
        assert time.monotonic() - began < 10
        child.send_signal(signal.SIGCONT)
        exchange = fetch.receiver.exchange
        assert exchange is not None
        wait_until(lambda: not exchange.is_alive(), "end of the exchange that hung")
        receiver = TorchReceiver(60.0)
        assert same(receiver.fetch(address, OFFERED, "", MOST), content(LARGE).tensors)
        receiver.close()


def test_nothing_is_sent_to_one_without_the_token(sender: TorchSender) -> None:
    sender.offer(OFFERED, [Content(None, {"w": torch.arange(10.0)})])
    with pytest.raises(TransportError):
        TorchReceiver(1.0).fetch(replace(sender.address, token="0" * 64), OFFERED, "", MOST)
    assert not sender._peers
    # One who sees another's knock and takes its place still cannot answer the challenge.
    host, port, token = sender.address.host, sender.address.port, sender.address.token
    store = open_store(host, port, 5)
    pair = Pair(store, knock(store, token, time.monotonic() + 5), RECEIVER, host, 5)
    challenge = pair.receive(wire.CHALLENGE)
    pair.send(wire.proof("0" * 64, challenge))
    with pytest.raises(RuntimeError, match=r"closed|reset"):
        pair.receive(wire.ANSWER)
    # A knock is good for its own number only.
    value = bytes(store.get("knock/0"))
    store.set(f"knock/{int(store.get('next'))}", value)
    wait_until(lambda: not sender._peers, "refusal")
    receiver = TorchReceiver(60.0)
    assert receiver.fetch(sender.address, OFFERED, "", MOST) is not None
    receiver.close()


def test_it_listens_on_the_address_that_it_was_given_alone(sender: TorchSender) -> None:
    listening = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]:
            address, _, port = line.split()[1].rpartition(":")
            if line.split()[3] == "0A" and int(port, 16) == sender.address.port:
                listening.append(address)
    assert listening == ["0100007F"]  # 127.0.0.1
    with pytest.raises(ConfigError, match=r"weights.listen = '192.0.2.1' cannot be listened on"):
        TorchSender("192.0.2.1", 1.0)


FETCH = """
import json, sys
from relax_actors.weights.torch_transport.receiver import TorchReceiver
from relax_actors.weights.torch_transport.sender import Address
TorchReceiver(60.0).fetch(Address(**json.loads(sys.argv[1])), "f" * 32, "", 1 << 40)
"""


def test_a_receiver_that_hangs_holds_neither_the_trainer_nor_its_memory(sender: TorchSender) -> None:
    old = torch.zeros(LARGE << 20, dtype=torch.uint8)
    alive = weakref.ref(old)
    sender.offer(OFFERED, [Content(None, {"w": old})])
    del old
    address = json.dumps({"host": sender.address.host, "port": sender.address.port, "token": sender.address.token})
    with subprocess.Popen([sys.executable, "-c", FETCH, address]) as child:
        try:
            wait_until(lambda: sender._peers, "receiver")
            os.kill(child.pid, signal.SIGSTOP)
            began = time.monotonic()
            sender.offer("e" * 32, [Content(None, {"w": torch.ones(3)})])
            assert time.monotonic() - began < 5
            wait_until(lambda: gc.collect() >= 0 and alive() is None, "memory given back")
            other = TorchReceiver(60.0)
            assert same(other.fetch(sender.address, "e" * 32, "", MOST), {"w": torch.ones(3)})
            other.close()
        finally:
            child.kill()
    wait_until(lambda: not sender._peers, "end of the connection")


class Ends:
    """A trainer's and several rollouts' ends of one run."""

    def __init__(self, make_context: MakeContext) -> None:
        self._make_context = make_context
        self._closes: list[Callable[[], None]] = []

    def sender(self, *settings: str, incarnation: int = 1) -> Sender:
        sender = Sender(self._make_context("trainer", *TORCH, *settings, incarnation=incarnation))
        self._closes.append(sender.publisher.close)
        return sender

    def receiver(self, *settings: str) -> Receiver:
        receiver = Receiver(self._make_context("rollout", *TORCH, *settings))
        self._closes.append(receiver.stager.close)
        return receiver

    def close(self) -> None:
        for close in reversed(self._closes):
            close()


@pytest.fixture
def ends(make_context: MakeContext) -> Iterator[Ends]:
    made = Ends(make_context)
    yield made
    made.close()


def events(sender: Sender) -> list[dict[str, Any]]:
    """What the run's journal holds of files that were read, or found corrupt."""
    table = sender.context.table

    async def read() -> list[dict[str, Any]]:
        stream = await table.connection.js.stream_info(table.subjects.log_stream)
        found = []
        for number in range(max(1, stream.state.first_seq), stream.state.last_seq + 1):
            body = json.loads((await table.connection.js.get_msg(table.subjects.log_stream, number)).data or b"{}")
            if body.get("kind") in ("weights_from_file", "weights_corrupt", "weights_not_offered"):
                found.append(body)
        return found

    return table.connection.call(read(), 20)


def note(sender: Sender, address: Address) -> None:
    body = {"host": address.host, "port": address.port, "token": address.token}
    sender.context.table.connection.call(sender.context.state.put(NOTE, body), 20)


def test_an_engine_follows_whole_sets_and_deltas_from_memory(ends: Ends) -> None:
    sender, receiver = ends.sender(), ends.receiver()
    for version in range(7):
        if version:
            sender.step()
        receiver.stager.use(version)
        assert receiver.serves() == sender.cell(version).fingerprint == sender.engine.fingerprint()
    assert sender.bases() == [None, 0, 1, 2, None, 4, 5]
    assert receiver.stager.from_memory == 7
    assert events(sender) == []


def test_float32_weights_in_memory_stay_those_published_while_training_goes_on(ends: Ends) -> None:
    sender, receiver = ends.sender("trainer.precision=float32"), ends.receiver("trainer.precision=float32")
    receiver.stager.use(0)
    receiver.stager.close()
    sender.step()
    with torch.no_grad():
        for parameter in sender.engine._model.parameters():
            parameter.add_(1.0)
    assert receiver.stager._look_for_newer()
    receiver.stager.use(1)
    assert receiver.stager.from_memory == 2
    assert receiver.engine.version == 1
    assert events(sender) == []


def test_one_that_joins_late_has_all_from_memory(ends: Ends) -> None:
    sender = ends.sender()
    sender.step(7)
    for version in (5, 6):
        path = sender.context.table.store.path(sender.cell(version).shards[0].path)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1  # it would be found out if it were read
        path.write_bytes(data)
    late = ends.receiver()
    late.stager.use(7)
    assert late.serves() == sender.cell(7).fingerprint
    assert late.stager.from_memory == 1
    assert events(sender) == []
    sender.step()
    late.stager.use(8)
    assert late.serves() == sender.cell(8).fingerprint
    assert late.stager.from_memory == 2


def test_a_new_life_of_the_trainer_is_found_by_those_that_knew_the_old_one(ends: Ends) -> None:
    first, receiver = ends.sender(), ends.receiver()
    first.step(2)
    receiver.stager.use(2)
    before = receiver.stager.from_memory
    first.publisher.close()
    life = ends.sender(incarnation=2)  # replays what was published, and goes on
    life.step(2)
    late = ends.receiver()
    late.stager.use(2)  # published by the first life, held by the second
    assert late.stager.from_memory == 1
    life.step(1)
    receiver.stager.use(3)
    assert receiver.serves() == life.cell(3).fingerprint
    assert receiver.stager.from_memory == before + 1
    assert events(life) == []


def test_a_stopped_sender_is_told_once_and_the_files_are_read(ends: Ends) -> None:
    sender, receiver = ends.sender("weights.patience=1"), ends.receiver("weights.patience=1")
    receiver.stager.use(0)
    with sending(1) as (child, address):
        child.send_signal(signal.SIGSTOP)
        note(sender, address)
        for version in (1, 2, 3):
            sender.step()
            began = time.monotonic()
            receiver.stager.use(version)
            assert time.monotonic() - began < 15
            assert receiver.serves() == sender.cell(version).fingerprint
    assert receiver.stager.from_memory == 1
    assert [event["kind"] for event in wait_until(lambda: events(sender), "event")] == ["weights_from_file"]


def test_wrong_bytes_are_never_served(ends: Ends, sender: TorchSender) -> None:
    trainer, receiver = ends.sender(), ends.receiver()
    receiver.stager.use(0)
    receiver.stager.close()
    trainer.step()
    fingerprint = trainer.cell(1).fingerprint
    good = trainer.engine.contents()[-1].tensors
    note(trainer, sender.address)
    sender.offer(fingerprint, [Content(None, {name: torch.zeros_like(t) for name, t in good.items()})])
    assert receiver.stager._look_for_newer()
    receiver.stager.use(1)
    assert receiver.serves() == fingerprint
    (event,) = wait_until(lambda: events(trainer), "event")
    assert event["kind"] == "weights_from_file"
    assert "published was" in event["error"]


def test_an_address_that_is_none_is_told_and_the_files_are_read(ends: Ends) -> None:
    sender = ends.sender()
    table, state = sender.context.table, sender.context.state
    table.connection.call(state.put(NOTE, {"host": 7, "port": "x", "token": None}), 20)
    receiver = ends.receiver()
    receiver.stager.use(0)
    assert receiver.serves() == sender.cell(0).fingerprint
    assert receiver.stager.from_memory == 0
    assert [event["error"] for event in wait_until(lambda: events(sender), "event")] == [
        "no sender has said where it is"
    ]
