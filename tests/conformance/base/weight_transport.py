"""Suite of weight transports (`Sender` and `Receiver`): every copy has the bits that were published, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from broker.errors import StoreError
from tests.support.contexts import MakeContext
from tests.support.weight_ends import DELTAS, ReceiverEnd, RolloutEnd, TrainerEnd

EVALUATED = ("run.steps=100", "eval.every=3", "eval.data.kind=python", "eval.data.function=tiny_tasks.make")


class Ends:
    """The ends of one run; all are closed at the end of a test."""

    def __init__(self, make_context: MakeContext, settings: tuple[str, ...]) -> None:
        self._make_context, self._settings = make_context, settings
        self._closes: list[Callable[[], None]] = []

    def trainer(self, *settings: str, incarnation: int = 1) -> TrainerEnd:
        """Start an incarnation of the trainer."""
        end = TrainerEnd(self._make_context("trainer", *self._settings, *settings, incarnation=incarnation))
        self._closes.append(end.publisher.close)
        return end

    def receiver(self, *settings: str) -> ReceiverEnd:
        """Start a receiver with an empty copy."""
        end = ReceiverEnd(self._make_context("rollout", *self._settings, *settings))
        self._closes.append(end.close)
        return end

    def rollout(self, *settings: str) -> RolloutEnd:
        """Start an engine that follows the publications."""
        end = RolloutEnd(self._make_context("rollout", *self._settings, *settings))
        self._closes.append(end.close)
        return end

    def close(self) -> None:
        for close in reversed(self._closes):
            close()


class WeightTransportConformance:
    """Laws of every transport; subclasses give its settings."""

    implements: str
    """Name in the registry."""
    settings: tuple[str, ...]

    @pytest.fixture
    def ends(self, make_context: MakeContext) -> Iterator[Ends]:
        made = Ends(make_context, (*DELTAS, *self.settings))
        yield made
        made.close()

    def test_a_copy_follows_whole_sets_and_deltas(self, ends: Ends) -> None:
        trainer, receiver = ends.trainer(), ends.receiver()
        for version in range(7):
            if version:
                trainer.step()
            assert receiver.bring(trainer, version)
            assert receiver.copy.fingerprint == trainer.engine.fingerprint()
        assert trainer.bases() == [None, 0, 1, 2, None, 4, 5]

    def test_an_engine_serves_every_version_that_is_published(self, ends: Ends) -> None:
        trainer, rollout = ends.trainer(), ends.rollout()
        for version in range(7):
            if version:
                trainer.step()
            rollout.stager.use_newest(version)
            assert rollout.engine.version == version
            assert rollout.stager.serving == trainer.cell(version)
            assert rollout.serves() == trainer.cell(version).fingerprint == trainer.engine.fingerprint()
        sizes = [sum(shard.nbytes for shard in trainer.cell(version).shards) for version in (4, 5, 6)]
        assert max(sizes[1:]) < sizes[0] / 2

    def test_a_late_joiner_gets_all_weights(self, ends: Ends) -> None:
        trainer = ends.trainer()
        for last in (2, 7, 9):
            trainer.step(last - trainer.version)
            late = ends.receiver()
            assert late.bring(trainer, last)

    def test_a_receiver_that_was_away_for_long_gets_a_whole_set(self, ends: Ends) -> None:
        trainer, receiver = ends.trainer(), ends.receiver()
        assert receiver.bring(trainer, 0)
        trainer.step(11)
        assert 0 not in trainer.files()
        assert receiver.bring(trainer, 11)

    def test_receivers_find_the_next_incarnation_of_the_trainer(self, ends: Ends) -> None:
        first, receiver = ends.trainer(), ends.receiver()
        first.step(2)
        assert receiver.bring(first, 2)
        first.publisher.close()
        second = ends.trainer(incarnation=2)
        second.step(2)  # publishes what the first incarnation published, again
        late = ends.receiver()
        assert late.bring(second, 2)
        second.step()
        assert second.bases() == [None, 0, 1, 2]
        assert receiver.bring(second, 3)

    def test_an_older_version_is_brought_exactly_and_then_the_newest(self, ends: Ends) -> None:
        trainer = ends.trainer(*EVALUATED)
        trainer.step(5)
        receiver = ends.receiver(*EVALUATED)
        assert receiver.bring(trainer, 3)
        assert receiver.bring(trainer, 5)
        trainer.step()
        assert receiver.bring(trainer, 6)

    def test_float32_weights_are_those_that_were_published_while_training_continues(self, ends: Ends) -> None:
        trainer, receiver = ends.trainer("trainer.precision=float32"), ends.receiver("trainer.precision=float32")
        assert receiver.bring(trainer, 0)
        trainer.step()
        published = trainer.cell(1).fingerprint
        # A step whose weights are not published yet.
        trainer.engine.initialise(77)
        assert trainer.engine.fingerprint() != published
        assert receiver.bring(trainer, 1)

    def test_versions_whose_files_are_gone_are_not_brought(self, ends: Ends) -> None:
        trainer = ends.trainer("weights.delta=off")
        trainer.step(2)
        trainer.file(1).unlink()
        receiver = ends.receiver("weights.delta=off")
        assert not receiver.bring(trainer, 1)
        assert receiver.copy.version is None
        assert receiver.bring(trainer, 2)

    def test_damaged_files_are_never_taken(self, ends: Ends) -> None:
        trainer = ends.trainer()
        trainer.step(2)
        trainer.damage(1)
        receiver = ends.receiver()
        with pytest.raises(StoreError, match="published was"):
            receiver.bring(trainer, 1)
        assert (receiver.copy.version, receiver.copy.fingerprint, dict(receiver.copy.tensors)) == (None, "", {})

    def test_ends_may_be_closed_twice(self, ends: Ends) -> None:
        trainer, receiver = ends.trainer(), ends.receiver()
        assert receiver.bring(trainer, 0)
        for _ in range(2):
            receiver.close()
            trainer.publisher.close()
