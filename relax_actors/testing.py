"""Checks of a user's own algorithm functions, for the user's tests."""

from relax_actors.algorithms.policy_check import check_policy_loss

__all__ = ["check_policy_loss"]
