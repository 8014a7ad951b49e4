"""Check the values of reward functions."""

from __future__ import annotations

from numbers import Real

from relax_actors.errors import RowError

LARGEST = (2 - 2**-23) * 2.0**127  # the largest finite float32; rewards are stored as float32


def checked(value: object, reward_name: str) -> float:
    """Convert the value of a reward function to a float that is finite as float32; a bool is 0 or 1.

    Raises:
        RowError: the value is not a real number, or not finite.
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
    msg = f"reward {reward_name} returned {value!r:.200} ({type(value).__name__}); return a finite number"
    raise RowError(msg)
