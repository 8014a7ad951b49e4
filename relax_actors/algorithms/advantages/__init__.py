"""Advantage estimators by family: pure functions from the rewards of a group to its advantages.

Import the module that you need. None imports torch, so the role `advantages` does not.
"""
