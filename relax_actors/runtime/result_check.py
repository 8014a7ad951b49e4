"""Check of a role's result before it is written, so that the error names its author.

Columns of rewards hold one number per sample, `advantage` one per sample or token, columns of log-probs one per token.
Other columns hold what their readers expect, which only the readers can check.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from broker.codec import Array
from relax_actors.errors import RowError
from relax_actors.messages import Advantage, Reward, Trajectory
from relax_actors.runtime.context import Context
from relax_actors.runtime.role import Role
from relax_actors.runtime.row import Row

PER_TOKEN = ("reference", "actor_fwd", "squares")


class ResultCheck:
    """Checks the results of one role."""

    def __init__(self, role: Role, context: Context) -> None:
        self._column, self._config = role.writes, context.config
        self._author = f"role {context.role} ({type(role).__name__})"
        self._rewards = ("reward", context.config.advantages.reads)

    def __call__(self, row: Row, value: Any) -> None:
        """Check the result of a row.

        Raises:
            RowError: the result cannot be the row's column: wrong type, number of numbers, or components.
        """
        if self._column in self._rewards:
            self._check_rewards(row, value)
        elif self._column == "advantage":
            self._check_type(row, value, Advantage)
            samples, tokens = self._samples(row), self._tokens(row)
            if samples is not None and len(value.values) not in (samples, tokens or samples):
                self._refuse(row, f"{len(value.values)} advantages", f"{samples}, one per sample, or one per token")
        elif self._column == "trajectory":
            self._check_type(row, value, Trajectory)
        elif self._column in PER_TOKEN and (tokens := self._tokens(row)) is not None:
            numbers = self._numbers(row, value, f"{tokens} numbers, one per token")
            if len(numbers) != tokens:
                self._refuse(row, f"{len(numbers)} numbers", f"{tokens}, one per token")

    def _check_rewards(self, row: Row, value: Any) -> None:
        if self._column == "reward":
            self._check_type(row, value, Reward)
        samples = self._samples(row)
        wanted = "one number per sample" if samples is None else f"{samples}, one per sample"
        numbers = value.values if isinstance(value, Reward) else self._numbers(row, value, wanted)
        if samples is not None and len(numbers) != samples:
            self._refuse(row, f"{len(numbers)} numbers", wanted)
        if not isinstance(value, Reward):
            return
        expected = sorted(self._config.reward_components)
        # Held-out rows have a reward function of their own, and only their values are read.
        if not row.is_eval and sorted(value.components) != expected:
            how = f"components {expected}: the same in every row, or set reward.components"
            self._refuse(row, f"reward components {sorted(value.components)}", how)
        if value.lengths is not None and "trajectory" in row:
            lengths = row.trajectory.sample_lengths.tolist()
            if value.lengths.tolist() != lengths:
                self._refuse(row, f"token_values for samples of {value.lengths.tolist()} tokens", f"{lengths}")

    def _samples(self, row: Row) -> int | None:
        """Return the number of samples of the row, from a column that the role reads, or None."""
        if "trajectory" in row:
            return len(row.trajectory.texts)
        name = next((name for name in self._rewards if name in row), None)
        return None if name is None else len(row.column(name))

    def _tokens(self, row: Row) -> int | None:
        """Return the number of tokens of the row, from trajectory or token rewards, or None."""
        if "trajectory" in row:
            return len(row.trajectory.token_ids)
        reward = next((row.column(name) for name in self._rewards if name in row), None)
        return int(reward.lengths.sum()) if isinstance(reward, Reward) and reward.lengths is not None else None

    def _check_type(self, row: Row, value: Any, expected: type) -> None:
        if not isinstance(value, expected):
            self._refuse(row, f"a value of type {type(value).__name__}", f"relax_actors.messages.{expected.__name__}")

    def _numbers(self, row: Row, value: Any, wanted: str) -> Array:
        """Return plain data as an array of finite numbers."""
        try:
            numbers = np.asarray(value, np.float32) if isinstance(value, list | tuple | np.ndarray) else None
        except (ValueError, TypeError, OverflowError):
            numbers = None
        if numbers is None or numbers.ndim != 1 or not np.isfinite(numbers).all():
            self._refuse(row, f"{value!r:.100} ({type(value).__name__})", f"{wanted}, finite")
        return numbers

    def _refuse(self, row: Row, returned: str, expected: str) -> NoReturn:
        msg = f"{self._author} returned {returned} for column {self._column} of {row.id}; expected {expected}"
        raise RowError(msg)
