"""Checks before a run starts: roles, backends and transports bring their own; those of the machine are here."""

from relax_actors.checks.examine import Findings, examine, require

__all__ = ["Findings", "examine", "require"]
