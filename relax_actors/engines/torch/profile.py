"""`torch.profiler` around the steps of an engine."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity


class Profiled:
    """Adds `SupportsProfile` to an engine that computes with torch in this process.

    The profiler records operators of the calling thread and of its backward passes, and kernels of GPUs. It computes
    nothing and changes no random state, so that weights stay the same bits.
    """

    _profile: torch.profiler.profile | None = None

    def begin_profile(self) -> None:
        """Begin to record; see `SupportsProfile`. A recording that was not ended is discarded."""
        self.cancel_profile()
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        profile = torch.profiler.profile(activities=kinds, record_shapes=True)
        profile.start()
        self._profile = profile

    def cancel_profile(self) -> None:
        """Stop the recording, if there is one, without writing it."""
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.stop()

    def end_profile(self, path: Path) -> list[Path]:
        """End the recording and write it; see `SupportsProfile`."""
        profile, self._profile = self._profile, None
        if profile is None:
            return []
        profile.stop()
        temporary = path.with_name(f".{path.name.removesuffix('.gz')}.{os.getpid()}.tmp")
        try:
            profile.export_chrome_trace(str(temporary))
            _compress(temporary, path)
        finally:
            with suppress(FileNotFoundError):
                temporary.unlink()
        return [path]


def _compress(source: Path, target: Path) -> None:
    """Write a file compressed, complete or not at all."""
    import gzip  # noqa: PLC0415 only a profile needs it
    import shutil  # noqa: PLC0415

    unfinished = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with source.open("rb") as read, gzip.open(unfinished, "wb", compresslevel=1) as write:
            shutil.copyfileobj(read, write)
        unfinished.rename(target)
    finally:
        unfinished.unlink(missing_ok=True)
