"""Task of the demo, from the folder of the demo."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "demo"))

from sort_digits import make

__all__ = ["make"]
