"""Files of weights in the store: which are kept, repaired and removed, and what a rollout serves meanwhile."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from broker.errors import BrokerUnreachableError
from broker.table import Table
from relax_actors.engines.transformers.engine import TransformersEngine
from relax_actors.errors import ActorError, RowError
from relax_actors.messages import Evaluation, Weights
from relax_actors.weights import files as weights
from relax_actors.weights.host_copy import HostCopy
from relax_actors.weights.stager_actor import Newest
from relax_actors.weights.transports.store import StoreReceiver
from tests.support.contexts import MakeContext
from tests.support.running import wait_until
from tests.support.weight_ends import DELTAS, RolloutEnd, TrainerEnd

EVALUATED = ("run.steps=100", "eval.every=3", "eval.data.kind=python", "eval.data.function=tiny_tasks.make")


MakeReceiver = Callable[..., RolloutEnd]


@pytest.fixture
def make_sender(make_context: MakeContext) -> Callable[..., TrainerEnd]:
    return lambda *settings, incarnation=1: TrainerEnd(
        make_context("trainer", *DELTAS, *settings, incarnation=incarnation)
    )


@pytest.fixture
def make_receiver(make_context: MakeContext) -> Iterator[MakeReceiver]:
    made: list[RolloutEnd] = []

    def make(*settings: str, follows: bool = True) -> RolloutEnd:
        made.append(RolloutEnd(make_context("rollout", *DELTAS, *settings), follows=follows))
        return made[-1]

    yield make
    for receiver in made:
        receiver.close()


MakeSender = Callable[..., TrainerEnd]


def test_old_files_are_removed_except_the_bases_of_kept_deltas(make_sender: MakeSender) -> None:
    sender = make_sender(*EVALUATED, "weights.full_every=5")
    table = sender.context.table
    for version in (0, 3, 6, 9, 12):
        table.put(table.subjects.numbered("evaluation", version), Evaluation(version, 0.0, 1, {}))
    sender.step(13)
    assert [v for v, base in enumerate(sender.bases()) if base is None] == [0, 5, 10]
    # 10 to 13 are the last four, 9 and 12 are evaluated; 9 is a delta whose chain starts at 5.
    assert sender.files() == [5, 6, 7, 8, 9, 10, 11, 12, 13]
    sender.step(3)
    assert sender.files() == [10, 11, 12, 13, 14, 15, 16]


def test_version_is_kept_until_it_is_evaluated(make_sender: MakeSender) -> None:
    sender = make_sender(*EVALUATED, "weights.delta=off")
    table = sender.context.table
    for version in (0, 3):
        table.put(table.subjects.numbered("evaluation", version), Evaluation(version, 0.0, 1, {}))
    sender.step(20)
    assert sender.files() == [6, 9, 12, 15, 17, 18, 19, 20]
    for version in (6, 12):
        table.put(table.subjects.numbered("evaluation", version), Evaluation(version, 0.0, 1, {}))
    sender.step()
    assert sender.files() == [9, 15, 18, 19, 20, 21]


def test_lost_delta_is_replaced_by_a_full_set(make_sender: MakeSender, make_receiver: MakeReceiver) -> None:
    sender = make_sender()
    sender.step(3)
    store = sender.context.table.store
    store.path(sender.cell(2).shards[0].path).unlink()
    late = make_receiver()
    newest = store.path(sender.cell(3).shards[0].path)
    wait_until(lambda: not newest.exists(), "removal of the delta without base")
    sender.publisher.repair()
    late.stager.use_newest(3)
    assert late.serves() == sender.cell(3).fingerprint
    sender.publisher.repair()
    assert weights.delta_base(newest) is None
    sender.step()
    assert sender.bases()[4] is None


def test_corrupt_delta_is_removed_and_replaced(make_sender: MakeSender, make_receiver: MakeReceiver) -> None:
    sender = make_sender()
    receiver = make_receiver(follows=False)
    receiver.stager.use_newest(0)
    sender.step()
    path = sender.context.table.store.path(sender.cell(1).shards[0].path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert receiver.stager.prepare_newest() == Newest(1, is_staged=False)
    assert not path.exists()
    assert (receiver.engine.version, receiver.stager.serving) == (0, sender.cell(0))
    sender.publisher.repair()
    assert receiver.stager.prepare_newest().is_staged
    receiver.stager.use_newest(1)
    assert receiver.serves() == sender.cell(1).fingerprint


def test_restored_version_is_a_full_set_and_the_base_of_the_next_delta(
    make_sender: MakeSender, make_receiver: MakeReceiver
) -> None:
    first = make_sender()
    first.step(2)
    for version in (0, 1):
        first.context.table.store.path(first.cell(version).shards[0].path).unlink()
    first.publisher.restore(2)
    first.step()
    assert first.bases() == [None, 0, 1, 2]
    late = make_receiver()
    late.stager.use_newest(3)
    assert late.serves() == first.cell(3).fingerprint


def test_evaluated_version_is_served_exactly_before_the_newest_again(
    make_sender: MakeSender, make_receiver: MakeReceiver
) -> None:
    sender = make_sender(*EVALUATED)
    sender.step(5)
    receiver = make_receiver(*EVALUATED)
    receiver.stager.use_newest(5)
    for version in (3, 5, 3):
        assert receiver.stager.try_use_version(version)
        assert receiver.serves() == sender.cell(version).fingerprint
    receiver.stager.use_newest(4)
    assert receiver.serves() == sender.cell(5).fingerprint
    sender.step()
    receiver.stager.use_newest(6)
    assert receiver.serves() == sender.cell(6).fingerprint
    assert not receiver.stager.try_use_version(99)


def test_without_deltas_all_files_are_full_sets(
    make_sender: MakeSender, make_receiver: MakeReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = make_sender("weights.delta=off")
    copies: list[weakref.ref[HostCopy]] = []

    class RecordedCopy(HostCopy):
        def __init__(self) -> None:
            super().__init__()
            copies.append(weakref.ref(self))

    monkeypatch.setattr(TransformersEngine, "empty_copy", lambda _: RecordedCopy())
    receiver = make_receiver("weights.delta=off")
    sender.step(3)
    assert sender.bases() == [None] * 4
    receiver.stager.use_newest(3)
    assert receiver.serves() == sender.cell(3).fingerprint
    assert len(copies) > 1
    gc.collect()
    assert [copy.version for ref in copies if (copy := ref()) is not None] == [None], "the host holds no copy"


def test_missing_weights_are_an_error_that_blames_no_row(make_sender: MakeSender, make_receiver: MakeReceiver) -> None:
    sender = make_sender()
    for shard in sender.cell(sender.step()).shards:
        sender.context.table.store.path(shard.path).unlink()
    receiver = make_receiver("trainer.deadline=0.2")
    with pytest.raises(ActorError, match="a row needs weights 1 or newer"):
        receiver.stager.use_newest(1)
    # A row that demands an unpublished version is malformed: rows are admitted after their weights.
    with pytest.raises(RowError, match=r"weights 7 or newer.*published is 1"):
        receiver.stager.use_newest(7)


def test_weights_of_another_model_are_an_error_with_the_reason(
    make_sender: MakeSender, make_receiver: MakeReceiver, table: Table
) -> None:
    sender = make_sender()
    uri = "weights/1.1.safetensors"
    strangers = {"stranger": torch.zeros(3)}
    sender.context.table.store.write(uri, lambda path: weights.save(strangers, path))
    shard = sender.cell(0).shards[0]
    fingerprint = weights.fingerprint(strangers)
    table.put(table.subjects.numbered("weights", 1), Weights(1, fingerprint, [type(shard)(uri, 1, fingerprint)], 1))
    with pytest.raises(ActorError, match=r"weights cannot be prepared: .*unknown \['stranger'\]"):
        make_receiver().stager.use_newest(1)


def test_file_that_the_trainer_rewrote_meanwhile_is_not_removed(
    make_sender: MakeSender, make_receiver: MakeReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = make_sender("weights.delta=off"), make_receiver("weights.delta=off", follows=False)
    receiver.stager.use_newest(0)
    sender.step()
    path = sender.context.table.store.path(sender.cell(1).shards[0].path)
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    find_updates = StoreReceiver.updates_to

    def find_then_repair(receiver: StoreReceiver, target: Weights, current: int | None) -> Any:
        updates = find_updates(receiver, target, current)
        sender.publisher.repair()
        return updates

    monkeypatch.setattr(StoreReceiver, "updates_to", find_then_repair)
    path.unlink()  # found missing, and rewritten before it would be removed as corrupt
    assert receiver.stager.prepare_newest() == Newest(1, is_staged=False)
    assert path.exists()
    monkeypatch.setattr(StoreReceiver, "updates_to", find_updates)
    path.unlink()
    path.write_bytes(damaged)
    assert receiver.stager.prepare_newest() == Newest(1, is_staged=False)
    assert not path.exists()
    sender.publisher.repair()
    assert receiver.stager.prepare_newest().is_staged
    receiver.stager.use_newest(1)


def test_recovered_broker_failure_fails_no_row(
    make_sender: MakeSender, make_receiver: MakeReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, stager, failed = make_sender(), make_receiver(follows=False).stager, threading.Event()
    stager.use_newest(0)

    def away(table: Table, kind: str, expected: type[Any]) -> Any:
        failed.set()
        raise BrokerUnreachableError(f"no answer of {table} about {kind} of {expected}")

    with monkeypatch.context() as patch:
        patch.setattr(Table, "fetch_last", away)
        stager.start()
        assert failed.wait(10)
        with pytest.raises(BrokerUnreachableError, match="no answer"):
            stager.use_newest(1)
    sender.step()
    wait_until(lambda: stager.has_newer, "successful poll")
    stager.use_newest(1)
    assert stager.serving == sender.cell(1)


def test_evaluation_row_between_staging_and_use_does_not_lose_the_newest_weights(
    make_sender: MakeSender, make_receiver: MakeReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = make_sender("staleness.max=9"), make_receiver("staleness.max=9", follows=False)
    stager = receiver.stager
    stager.use_newest(0)
    sender.step(3)
    stage, row = receiver.engine.stage, threading.Thread(target=stager.try_use_version, args=(2,))

    def stage_then_start_row(version: int, tensors: Any) -> None:
        stage(version, tensors)
        if row.ident is None:
            row.start()
            row.join(0.3)  # waits for the stager

    monkeypatch.setattr(receiver.engine, "stage", stage_then_start_row)
    stager.prepare_newest()
    row.join()
    assert stager.serving == sender.cell(2)
    stager.prepare_newest()
    stager.use_newest(3)
    assert stager.serving is not None
    assert stager.serving.version == 3
