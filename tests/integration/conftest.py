"""Fixtures of several integration tests."""

from tests.support.session_ends import goes_on, left, make_sessions

__all__ = ["goes_on", "left", "make_sessions"]
