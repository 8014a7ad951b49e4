"""Types that tests of one actor name in their signatures."""

from __future__ import annotations

from tests.support.contexts import MakeContext, MakeTrainer

__all__ = ["MakeContext", "MakeTrainer"]
