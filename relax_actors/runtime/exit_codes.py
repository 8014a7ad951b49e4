"""Exit codes by which processes report to their supervisors how they ended."""

from __future__ import annotations

EXIT_CONFIG = 2
"""Configuration error; a restart cannot help."""
EXIT_CRASHED = 70
"""Failure while rows were being handled; counted against these rows."""
EXIT_HUNG = 71
"""No progress while rows were being handled; counted against these rows."""
EXIT_BLAMELESS = 72
"""Failure that no row can have caused."""
EXIT_BROKER_UNREACHABLE = 73
"""The broker does not answer. Counts neither against rows nor against the restart intensity."""
EXIT_PEER_LOST = 74
"""A process on another node that this one works with is gone. Counts as little as a broker that does not answer: the
other node's supervisor judges the death."""
EXIT_GAVE_UP = 75
"""A supervisor below this process gave up."""
EXIT_ALL_ROWS_FAILED = 76
"""The first rows of a role all failed with one error; a restart cannot help, and no single row is blamed."""
