"""Checks before a run: those of roles, backends, transports, and the machine."""

from relax_actors.checks.examine import Findings, examine, require

__all__ = ["Findings", "examine", "require"]
