"""Fixtures of several integration tests."""

from tests.support.service_ends import ends
from tests.support.session_ends import goes_on, left, make_sessions

__all__ = ["ends", "goes_on", "left", "make_sessions"]
