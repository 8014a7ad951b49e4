"""Engines that score what others generated: one protocol, one file an engine."""

from relax_actors.engines.scoring.protocol import ScoringEngine

__all__ = ["ScoringEngine"]
