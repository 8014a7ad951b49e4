"""Decoded parts of files, of which the last ones used are kept in memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

HELD_BYTES = 64 << 20
"""Bytes of the parts that rows are shuffled within."""
MOST_BYTES = 4 * HELD_BYTES
"""Bytes of the parts that are kept, as parts differ in size; a larger one is kept alone."""

Key = TypeVar("Key", bound=Hashable)


class HeldGroups(Generic[Key]):
    """Parts by key, such as the row groups of a Parquet file; read by several threads.

    `read` decodes a part: an object with `nbytes`, or an exception that says why there is none.
    """

    def __init__(self, read: Callable[[Key], Any]) -> None:
        self._read = read
        self._held: OrderedDict[Key, Any] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Key) -> Any:
        """Return a part; others that were not used for longest are forgotten for it."""
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key]
            part = self._held[key] = self._read(key)
            sizes = {name: getattr(held, "nbytes", 0) for name, held in self._held.items()}
            total = sum(sizes.values())
            for name in [*self._held][:-1]:
                if total <= MOST_BYTES:
                    break
                total -= sizes[name]
                del self._held[name]
            return part
