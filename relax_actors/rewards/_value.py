"""What a reward function may return."""

from __future__ import annotations

from numbers import Real

from relax_actors.errors import RowError

LARGEST = (2 - 2**-23) * 2.0**127  # the largest finite float32: rewards are stored as such


def checked(value: object, reward_name: str) -> float:
    """Return what a reward function gave as a float that is finite as float32; a bool is 0 or 1.

    Raises:
        RowError: it is no real number, or not finite.
    """
    item = getattr(value, "item", None)
    number = item() if callable(item) and getattr(value, "ndim", None) == 0 else value
    if isinstance(number, Real):
        try:
            result = float(number)
        except OverflowError:
            result = float("inf")
        if abs(result) <= LARGEST:
            return result
    msg = f"reward {reward_name} gave {value!r:.200} ({type(value).__name__}); return a finite number"
    raise RowError(msg)
