"""Fixtures of several unit tests."""

from tests.support.installed import install
from tests.support.written_config import write

__all__ = ["install", "write"]
