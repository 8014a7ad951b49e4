"""Lock files of the devices that actors share, as the actors and the keepers of inference servers see them.

Each device has two: that of its holder, which contains the holder's name, and that of the next one. The kernel releases
both when their process ends.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from broker.files import open_lock, try_lock, unlock
from relax_actors.config import Config
from relax_actors.devices.binding import leased_devices
from relax_actors.runtime.run_folder import RunFolder


class Device:
    """Lock files of a device: that of its holder, and that of the next one."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.name = path.stem
        self.lock, self.next = open_lock(path), open_lock(path.with_suffix(".next"))

    @property
    def holder(self) -> str:
        """The actor that held the device last, as `<role>.<n>#<incarnation>`; "nobody" before the first."""
        return os.pread(self.lock, 80, 0).decode(errors="replace").strip() or "nobody"

    def close(self) -> None:
        """Close the files, which gives up their locks."""
        os.close(self.lock)
        os.close(self.next)


def device_locks(config: Config, role: str) -> list[Path]:
    """Return the lock files of the shared devices of this process."""
    device = config.placement.device_of(role)
    names = () if device is None else leased_devices() or (str(device),)
    return [RunFolder(config.folder).device_lock(name) for name in names]


def is_held_by(paths: Sequence[Path], actor: str) -> bool:
    """Return whether an actor, as `<role>.<n>`, holds all of some devices now."""
    devices = [Device(path) for path in paths]
    try:
        return all(
            device.holder.startswith(f"{actor}#") and not (try_lock(device.lock) and unlock(device.lock))
            for device in devices
        )
    finally:
        for device in devices:
            device.close()


@contextmanager
def kept_free(paths: Sequence[Path], holder: str) -> Iterator[None]:
    """Let nobody take those of some devices that nobody holds, within the block; `holder` is who keeps them free."""
    devices = [Device(path) for path in paths]
    try:
        for device in devices:
            if try_lock(device.lock):
                os.pwrite(device.lock, holder.encode().ljust(80), 0)
        yield
    finally:
        for device in devices:
            device.close()
