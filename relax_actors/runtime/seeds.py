"""Seeds of all random choices, from (run seed, step, index) alone."""

from __future__ import annotations

import xxhash


def derive_seed(run_seed: int, *parts: int | str) -> int:
    """Derive a 63-bit seed from the run's seed and the parts that name the choice."""
    text = "|".join(map(str, (run_seed, *parts))).encode()
    return xxhash.xxh3_64_intdigest(text) >> 1
