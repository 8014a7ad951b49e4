"""Checks of a run before it starts: those that its parts bring, and those of the machine, which belong to no part."""

from relax_actors.checks.examine import Findings, examine, require

__all__ = ["Findings", "examine", "require"]
