"""Environments: what a model acts in over several turns, and the tools that it calls."""

from relax_actors.envs.environment import Environment, Observation, Result, Step

__all__ = ["Environment", "Observation", "Result", "Step"]
