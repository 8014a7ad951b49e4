"""Task of the demo, from the folder of the demo, and a reward that teaches nothing."""

import sys
import zlib
from pathlib import Path

from relax_actors import Prompt

sys.path.append(str(Path(__file__).parents[1] / "demo"))

from sort_digits import make

__all__ = ["chance", "make"]


def chance(completion: str, prompt: Prompt) -> float:
    """Return 0 or 1 at random, the same for the same text: what an algorithm learns without information."""
    return float(zlib.crc32(f"{prompt.text} {completion}".encode()) % 2)
