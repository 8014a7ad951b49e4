"""Encodes a model's weights for publication, as a full set or as a delta."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from relax_actors.weights import deltas
from relax_actors.weights import files as weights

MAX_DELTA_SHARE = 0.5
"""A delta larger than this share of the full set is not worth the work of applying it."""


Take: TypeAlias = Callable[[str, Tensor], None]
"""Takes a tensor with its name, which it may use until it returns."""


FLOAT32 = ("e_score_correction_bias",)
"""Last parts of the names of tensors that every precision publishes in float32: biases by which routers choose experts,
as in DeepSeek-V3 (arXiv:2412.19437, section 2.1.2) and GLM-4-MoE. Rounded, they choose other experts."""


def published_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a tensor is published, where others are in `dtype`."""
    return torch.float32 if name.endswith(FLOAT32) else dtype


class WeightSource(Protocol):
    """Current weights of a model in the published dtype, by their Hugging Face names.

    The ranks of an engine share them: each writes a file with the tensors that it owns. Methods are collective.
    """

    rank: int
    """Number of this rank."""
    ranks: int
    prefixes: bytes
    """On rank 0, `Fingerprint.prefixes` of the last visit."""

    def forms(self, files: int) -> Mapping[str, weights.TensorForm]:
        """Return the forms of this rank's tensors, if the first `files` ranks write a file."""

    def visit(self, take: Take, files: int) -> str:
        """Pass each tensor to its owner's `take`; return the fingerprint of all.

        If `take` raises on a rank, all tensors are visited nonetheless, so that no rank waits for this one.
        """

    def total(self, number: int) -> int:
        """Return the sum of a number over all ranks."""


class LocalSource:
    """Weights of a model that is in one process; implements `WeightSource`.

    `lock` is held while they are read, and `dtype` is that in which they are published; see `published_dtype`.
    """

    rank, ranks = 0, 1
    prefixes = b""

    def __init__(
        self, tensors: Callable[[], Mapping[str, Tensor]], dtype: torch.dtype, lock: AbstractContextManager[Any]
    ) -> None:
        self._read, self._dtype, self._lock = tensors, dtype, lock

    def forms(self, files: int) -> Mapping[str, weights.TensorForm]:  # noqa: ARG002 one rank writes all
        """Return the forms of all tensors."""
        return {
            name: weights.TensorForm(published_dtype(name, self._dtype), tuple(tensor.shape))
            for name, tensor in self._read().items()
        }

    def visit(self, take: Take, files: int) -> str:  # noqa: ARG002 one rank writes all
        """Pass each tensor to `take`; see `WeightSource`."""
        with self._lock:
            left = {n: tensor.detach().to(published_dtype(n, self._dtype)) for n, tensor in self._read().items()}
        digest = weights.Fingerprint()
        for name in sorted(left):
            tensor = left.pop(name).cpu()
            digest.add(name, tensor)
            take(name, tensor)
        self.prefixes = digest.prefixes
        return digest.hexdigest()

    def total(self, number: int) -> int:
        """Return the number."""
        return number


def ignore(_: str, __: Tensor) -> None:
    """Take no tensor of `WeightSource.visit`."""


def visit_into(source: WeightSource, open_file: Callable[[ExitStack], Take], files: int) -> str:
    """Visit all tensors and return their fingerprint; ranks without a file take part.

    `open_file` opens the file of this rank, and returns the function that takes its tensors; see `WeightSource.visit`.

    Raises:
        OSError: this rank cannot write its file.
    """
    failure: OSError | None = None
    with ExitStack() as stack:
        try:
            take = open_file(stack)
        except OSError as error:
            failure, take = error, ignore
        fingerprint = source.visit(take, files)
    if failure is not None:
        raise failure
    return fingerprint


class WeightEncoder:
    """Fingerprints, full sets and deltas of a model, by all ranks; methods are collective.

    Args:
        source: the current weights.
        keep_base: whether to keep a copy of the last published weights, on their device, to compute deltas.
        reading: held while copies of weights are read, where they may leave the device.
    """

    def __init__(
        self, source: WeightSource, *, keep_base: bool, reading: AbstractContextManager[Any] | None = None
    ) -> None:
        self._source, self._keep_base, self._reading = source, keep_base, reading or nullcontext()
        # With `keep_base` the tensors of this rank.
        self._current: dict[str, Tensor] | None = None
        self._fingerprint: str | None = None
        self._base: tuple[str, dict[str, Tensor]] | None = None

    def invalidate(self) -> None:
        """Forget what was read of the model; call it whenever its weights have changed."""
        self._current = self._fingerprint = None

    def copies(self) -> list[Tensor]:
        """Return the copies of weights that it keeps for the next delta, on the device of the model."""
        base = {} if self._base is None else self._base[1]
        return [*base.values(), *(self._current or {}).values()]

    def _tensors(self) -> dict[str, Tensor]:
        """Return a copy of the tensors of this rank."""
        if self._current is None:
            current: dict[str, Tensor] = {}

            def keep(name: str, tensor: Tensor) -> None:
                current[name] = tensor.detach().clone()

            self._fingerprint = self._source.visit(keep, self._source.ranks)
            self._current = current
        return self._current

    def fingerprint(self) -> str:
        """Return the fingerprint of the current weights in the published dtype."""
        if self._fingerprint is None:
            if self._keep_base:
                with self._reading:
                    self._tensors()
            else:
                self._fingerprint = self._source.visit(ignore, self._source.ranks)
        assert self._fingerprint is not None  # noqa: S101 set by the visit
        return self._fingerprint

    def prefixes(self) -> bytes:
        """Return digests of the leading tensors; see `Fingerprint.prefixes`."""
        self.fingerprint()
        return self._source.prefixes

    def write_full(self, *paths: Path) -> str:
        """Write all weights, each rank its file; return their fingerprint.

        Args:
            paths: a file for each rank. Of a version that was published by more or fewer ranks there are as many files:
                those beyond the ranks are empty, and ranks beyond the files write none.
        """
        source = self._source
        if self._keep_base and len(paths) == source.ranks:
            with self._reading:
                weights.save(self._tensors(), paths[source.rank])
                return self.fingerprint()
        files = min(len(paths), source.ranks)

        def open_file(stack: ExitStack) -> Take:
            for path in paths[files:] if source.rank == 0 else ():
                weights.save({}, path)
            if source.rank >= files:
                return ignore
            return stack.enter_context(weights.TensorFile(paths[source.rank], source.forms(files))).write

        self._fingerprint = visit_into(source, open_file, files)
        return self._fingerprint

    def delta_writer(self) -> Callable[..., str] | None:
        """Return a function that writes the delta to the base, as `write_full` does.

        None if there is no base, or if the delta is too large to pay off.
        """
        if self._base is None:
            return None
        fingerprint, base = self._base
        with self._reading:
            delta = deltas.encode(base, self._tensors())
            size, whole = (self._source.total(deltas.nbytes(tensors)) for tensors in (delta, self._tensors()))
        return None if size > MAX_DELTA_SHARE * whole else partial(self._write_delta, delta, fingerprint)

    def _write_delta(self, delta: dict[str, Tensor], base: str, *paths: Path) -> str:
        weights.save(delta, paths[self._source.rank], base)
        return self.fingerprint()

    def set_base(self) -> None:
        """Make the current weights the base of the next delta."""
        if self._keep_base:
            self._base = self.fingerprint(), self._tensors()
