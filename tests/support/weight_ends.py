"""The two ends of a weight transport: a trainer that publishes, and a rollout that receives."""

from __future__ import annotations

from pathlib import Path

import torch

from broker.table import Table
from relax_actors.engines.protocols import TrainingEngine, train
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.engines.torch.model import tensors_of
from relax_actors.engines.transformers.engine import TransformersEngine
from relax_actors.messages import Weights
from relax_actors.runtime import Context
from relax_actors.weights import files as weights
from relax_actors.weights.host_copy import HostCopy
from relax_actors.weights.publisher import Publisher
from relax_actors.weights.stager import Stager
from relax_actors.weights.transports import make_transport
from tests.support.batches import equal_sequences

DELTAS = ("staleness.max=0", "trainer.precision=bfloat16", "trainer.learning_rate=1e-5", "weights.full_every=4")
"""Settings with which every fourth version is a whole set and the others are deltas."""


class TrainerEnd:
    """One incarnation of a trainer, without its rows. It has published version 0.

    Args:
        context: of the trainer.
        engine: with the weights of a seed; by default one with torch.
    """

    def __init__(self, context: Context, engine: TrainingEngine | None = None) -> None:
        self.context = context
        self.engine = TorchEngine(context.config) if engine is None else engine
        self.engine.initialise(5)
        self.publisher = Publisher(context, self.engine)
        self.version = 0
        self.publisher.publish(0)

    @property
    def table(self) -> Table:
        return self.context.table

    def step(self, count: int = 1) -> int:
        """Train and publish `count` versions; returns the last one."""
        for _ in range(count):
            train(self.engine, equal_sequences(self.version), self.version, lambda: None)
            self.version += 1
            self.publisher.publish(self.version)
        return self.version

    def cell(self, version: int) -> Weights:
        """The publication of a version."""
        found = self.table.fetch(self.table.subjects.numbered("weights", version), Weights)
        assert found is not None
        return found

    def file(self, version: int) -> Path:
        """The file of a version."""
        return self.table.store.path(self.cell(version).shards[0].path)

    def damage(self, version: int) -> None:
        """Flip the last bit of a version's file."""
        data = bytearray(self.file(version).read_bytes())
        data[-1] ^= 1
        self.file(version).write_bytes(data)

    def bases(self) -> list[int | None]:
        """The version that each version is a delta to; None for whole sets."""
        return [self.cell(version).base_version for version in range(self.version + 1)]

    def files(self) -> list[int]:
        """Versions whose files are kept."""
        folder = self.table.store.path("weights")
        return sorted(int(path.name.split(".")[0]) for path in folder.glob("*.safetensors"))


class ReceiverEnd:
    """The receiving end of a transport with the copy that it brings from version to version."""

    def __init__(self, context: Context) -> None:
        self.receiver = make_transport(context).make_receiver(follows=True)
        self.copy = HostCopy()

    def bring(self, trainer: TrainerEnd, version: int) -> bool:
        """Bring the copy to a version of a trainer; checks that its fingerprint is the published one."""
        published = trainer.cell(version)
        if not self.receiver.update(self.copy, published):
            return False
        assert (self.copy.version, self.copy.fingerprint) == (version, published.fingerprint)
        assert weights.fingerprint(self.copy.tensors) == published.fingerprint
        return True

    def close(self) -> None:
        self.receiver.close()


class RolloutEnd:
    """One incarnation of a rollout, without its rows: an engine whose weights follow the publications.

    Without `follows` weights are only staged on demand, until `stager.start` is called.
    """

    def __init__(self, context: Context, *, follows: bool = True) -> None:
        self.engine = TransformersEngine(context.config.model_path)
        self.stager = Stager(context, self.engine)
        if follows:
            self.stager.start()

    def serves(self) -> str:
        """Fingerprint of the weights in the model, in the published precision."""
        tensors = tensors_of(self.engine.model)
        return weights.fingerprint({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()})

    def close(self) -> None:
        self.stager.close()
