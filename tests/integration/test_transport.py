"""What only the torch transport does: connections between processes, and files wherever memory fails."""

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
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from relax_actors.errors import ConfigError
from relax_actors.weights.protocols import WeightPayload
from relax_actors.weights.transports.base import ADDRESS_KEY
from relax_actors.weights.transports.torch_transport import wire
from relax_actors.weights.transports.torch_transport.pair import RECEIVER, Pair, open_store
from relax_actors.weights.transports.torch_transport.receiver import TorchReceiver, TransportError
from relax_actors.weights.transports.torch_transport.sender import Address, TorchSender, request_pair
from tests.conformance.base.weight_transport import Ends
from tests.support.contexts import MakeContext
from tests.support.running import wait_until
from tests.support.sending import OFFERED, content, sending
from tests.support.weight_ends import DELTAS, TrainerEnd

TORCH = (*DELTAS, "weights.transport=torch", "weights.patience=5")
MOST = 1 << 30
LARGE = 256


class Fetch(threading.Thread):
    """A call of `fetch` in progress: its result, and the seconds that it took."""

    def __init__(self, seconds: float, address: Address) -> None:
        super().__init__()
        self.receiver, self.address = TorchReceiver(seconds), address
        self.found: WeightPayload | TransportError | None = None
        self.start()

    def run(self) -> None:
        began = time.monotonic()
        try:
            self.found = self.receiver.fetch(self.address, OFFERED, "", MOST)
        except TransportError as error:
            self.found = error
        self.seconds = time.monotonic() - began

    def wait_for_first_bytes(self) -> None:
        """Wait until a part of the weights has arrived."""
        wait_until(lambda: self.receiver.exchange is not None and self.receiver.exchange.nbytes, "first bytes")

    def end(self) -> WeightPayload | TransportError | None:
        self.join(120)
        assert not self.is_alive()
        return self.found


@pytest.fixture
def sender() -> Iterator[TorchSender]:
    made = TorchSender("127.0.0.1", 10.0)
    yield made
    made.close()


def same(found: WeightPayload | TransportError | None, tensors: Any) -> bool:
    assert isinstance(found, WeightPayload), found
    assert list(found.tensors) == list(tensors)
    return all(torch.equal(found.tensors[name], tensor) for name, tensor in tensors.items())


def test_tensors_are_received_from_another_process_again_and_again() -> None:
    with sending(20) as (_, address):
        receiver = TorchReceiver(60.0)
        for _ in range(3):
            assert same(receiver.fetch(address, OFFERED, "", MOST), content(20).tensors)
        assert receiver.fetch(address, "a" * 32, "", MOST) is None
        with pytest.raises(TransportError, match="bytes of tensors are offered"):
            receiver.fetch(address, OFFERED, "", 1 << 20)
        assert same(receiver.fetch(address, OFFERED, "", MOST), content(20).tensors)
        receiver.close()


def test_a_receiver_gets_the_delta_to_what_it_has_or_all_weights(sender: TorchSender) -> None:
    base, delta, whole = "b" * 32, {"w:gaps": torch.arange(9)}, {"w": torch.arange(100.0)}
    sender.offer(OFFERED, [WeightPayload(base, delta), WeightPayload(None, whole)])
    receiver = TorchReceiver(60.0)
    found = receiver.fetch(sender.address, OFFERED, base, MOST)
    assert same(found, delta)
    assert found is not None
    assert found.base == base
    assert same(receiver.fetch(sender.address, OFFERED, "c" * 32, MOST), whole)
    assert same(receiver.fetch(sender.address, OFFERED, "", MOST), whole)
    receiver.close()


def test_many_receivers_connect_and_disconnect(sender: TorchSender) -> None:
    tensors = {"w": torch.arange(1000.0)}
    sender.offer(OFFERED, [WeightPayload(None, tensors)])
    for _ in range(3):
        fetches = [Fetch(60.0, sender.address) for _ in range(6)]
        assert all(same(fetch.end(), tensors) for fetch in fetches)
        for fetch in fetches:
            fetch.receiver.close()
    wait_until(lambda: not sender.connections, "end of all connections")


def test_a_sender_killed_during_a_transfer_is_noticed_at_once() -> None:
    with sending(LARGE) as (child, address):
        fetch = Fetch(100.0, address)
        fetch.wait_for_first_bytes()
        child.send_signal(signal.SIGSTOP)
        child.kill()
        assert isinstance(fetch.end(), TransportError)
        assert fetch.seconds < 50
        # The exchange that still hangs must not keep the receiver from the next sender.
        with sending(1) as (_, other):
            assert same(fetch.receiver.fetch(other, OFFERED, "", MOST), content(1).tensors)
            fetch.receiver.close()
        with pytest.raises(TransportError, match="refused"):
            TorchReceiver(100.0).fetch(address, OFFERED, "", MOST)


def test_a_sender_stopped_during_a_transfer_delays_nobody_beyond_the_deadline() -> None:
    with sending(LARGE) as (child, address):
        fetch = Fetch(3.0, address)
        fetch.wait_for_first_bytes()
        child.send_signal(signal.SIGSTOP)
        assert isinstance(fetch.end(), TransportError)
        assert fetch.seconds < 10
        # Again, where not even a connection is made.
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


def test_nothing_is_sent_without_the_token(sender: TorchSender) -> None:
    sender.offer(OFFERED, [WeightPayload(None, {"w": torch.arange(10.0)})])
    with pytest.raises(TransportError):
        TorchReceiver(1.0).fetch(replace(sender.address, token="0" * 64), OFFERED, "", MOST)
    assert not sender.connections
    # A client that takes the place of another's knock still cannot answer the challenge.
    host, port, token = sender.address.host, sender.address.port, sender.address.token
    store = open_store(host, port, 5)
    pair = Pair(store, request_pair(store, token, time.monotonic() + 5), RECEIVER, host, 5)
    challenge = pair.receive(wire.CHALLENGE)
    pair.send(wire.proof("0" * 64, challenge))
    with pytest.raises(RuntimeError, match=r"closed|reset"):
        pair.receive(wire.ANSWER)
    # A knock is valid for its own number only.
    value = bytes(store.get("knock/0"))
    store.set(f"knock/{int(store.get('next'))}", value)
    wait_until(lambda: not sender.connections, "refusal")
    receiver = TorchReceiver(60.0)
    assert receiver.fetch(sender.address, OFFERED, "", MOST) is not None
    receiver.close()


def test_the_sender_listens_on_the_configured_address_only(sender: TorchSender) -> None:
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
from relax_actors.weights.transports.torch_transport.receiver import TorchReceiver
from relax_actors.weights.transports.torch_transport.sender import Address
TorchReceiver(60.0).fetch(Address(**json.loads(sys.argv[1])), "f" * 32, "", 1 << 40)
"""


def test_a_hung_receiver_delays_no_trainer_and_keeps_no_memory(sender: TorchSender) -> None:
    old = torch.zeros(LARGE << 20, dtype=torch.uint8)
    alive = weakref.ref(old)
    sender.offer(OFFERED, [WeightPayload(None, {"w": old})])
    del old
    address = json.dumps({"host": sender.address.host, "port": sender.address.port, "token": sender.address.token})
    with subprocess.Popen([sys.executable, "-c", FETCH, address]) as child:
        try:
            wait_until(lambda: sender.connections, "receiver")
            os.kill(child.pid, signal.SIGSTOP)
            began = time.monotonic()
            sender.offer("e" * 32, [WeightPayload(None, {"w": torch.ones(3)})])
            assert time.monotonic() - began < 5
            wait_until(lambda: gc.collect() >= 0 and alive() is None, "memory given back")
            other = TorchReceiver(60.0)
            assert same(other.fetch(sender.address, "e" * 32, "", MOST), {"w": torch.ones(3)})
            other.close()
        finally:
            child.kill()
    wait_until(lambda: not sender.connections, "end of the connection")


@pytest.fixture
def ends(make_context: MakeContext) -> Iterator[Ends]:
    made = Ends(make_context, TORCH)
    yield made
    made.close()


def events(trainer: TrainerEnd) -> list[dict[str, Any]]:
    """Events in the journal about files that were read, corrupt or not offered."""
    table = trainer.table

    async def read() -> list[dict[str, Any]]:
        stream = await table.connection.js.stream_info(table.subjects.log_stream)
        found = []
        for number in range(max(1, stream.state.first_seq), stream.state.last_seq + 1):
            body = json.loads((await table.connection.js.get_msg(table.subjects.log_stream, number)).data or b"{}")
            if body.get("kind") in ("weights_from_file", "weights_corrupt", "weights_not_offered"):
                found.append(body)
        return found

    return table.connection.call(read(), 20)


def publish_address(trainer: TrainerEnd, address: Address) -> None:
    """Replace the address at which receivers look for the trainer."""
    body = {"host": address.host, "port": address.port, "token": address.token}
    trainer.table.connection.call(trainer.context.state.put(ADDRESS_KEY, body), 20)


def test_weights_from_memory_cause_no_event_and_need_no_readable_file(ends: Ends) -> None:
    trainer = ends.trainer()
    trainer.step(7)
    for version in (5, 6):
        trainer.damage(version)  # reading the file would fail
    late = ends.receiver()
    assert late.bring(trainer, 7)
    assert late.receiver.received == 1
    trainer.step()
    assert late.bring(trainer, 8)
    assert late.receiver.received == 2
    assert events(trainer) == []


def test_files_are_read_after_one_event_while_the_sender_is_stopped(ends: Ends) -> None:
    trainer, receiver = ends.trainer("weights.patience=1"), ends.receiver("weights.patience=1")
    assert receiver.bring(trainer, 0)
    with sending(1) as (child, address):
        child.send_signal(signal.SIGSTOP)
        publish_address(trainer, address)
        for version in (1, 2, 3):
            trainer.step()
            began = time.monotonic()
            assert receiver.bring(trainer, version)
            assert time.monotonic() - began < 15
    assert receiver.receiver.received == 1
    assert [event["kind"] for event in wait_until(lambda: events(trainer), "event")] == ["weights_from_file"]


def test_wrong_bytes_from_memory_are_refused_and_the_file_is_read(ends: Ends, sender: TorchSender) -> None:
    trainer, receiver = ends.trainer(), ends.receiver()
    assert receiver.bring(trainer, 0)
    trainer.step()
    good = trainer.engine.payloads()[-1].tensors
    publish_address(trainer, sender.address)
    wrong = WeightPayload(None, {name: torch.zeros_like(tensor) for name, tensor in good.items()})
    sender.offer(trainer.cell(1).fingerprint, [wrong])
    assert receiver.bring(trainer, 1)
    assert receiver.receiver.received == 1
    (event,) = wait_until(lambda: events(trainer), "event")
    assert event["kind"] == "weights_from_file"
    assert "published was" in event["error"]


def test_files_are_read_while_the_published_address_is_malformed(ends: Ends) -> None:
    trainer = ends.trainer()
    trainer.table.connection.call(trainer.context.state.put(ADDRESS_KEY, {"host": 7, "port": "x", "token": None}), 20)
    receiver = ends.receiver()
    assert receiver.bring(trainer, 0)
    assert receiver.receiver.received == 0
    assert [event["error"] for event in wait_until(lambda: events(trainer), "event")] == [
        "no sender has published its address"
    ]
