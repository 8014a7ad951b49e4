"""Exit codes by which our processes tell their supervisors how they ended."""

from __future__ import annotations

EXIT_CONFIG = 2
"""A configuration error: starting again cannot help."""
EXIT_CRASHED = 70
"""A failure with rows in hand: it is counted against them."""
EXIT_HUNG = 71
"""No progress with rows in hand: likewise."""
EXIT_BLAMELESS = 72
"""A failure that no row can have caused."""
EXIT_BROKER_UNREACHABLE = 73
"""The broker does not answer: nobody's fault, and no sign that starting again would not help."""
EXIT_GAVE_UP = 75
"""A supervisor below gave up."""
