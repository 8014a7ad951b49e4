"""Scores the samples of a row with one reward function, or with a weighted sum of several."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from relax_actors.errors import ConfigError, RowError
from relax_actors.messages import Prompt, Sample
from relax_actors.registry.catalog import REWARDS
from relax_actors.rewards.loading import OPTIONS, RewardFunction, is_async, load_reward, parameters_of
from relax_actors.rewards.score import Score, Total, total_of
from relax_actors.rewards.together import together


class RewardScorer:
    """One reward function, or a weighted sum of several, whose scores are kept as components.

    A function has parameters (completion, prompt) and is called for each sample, or (completions, prompt) and is called
    once with all samples of the row. Calls of async functions run at the same time. A name may also be that of a column
    that a role has computed.

    Args:
        setting: name or dotted path of a function, or a table of them with weights.
        name: key of the setting, for errors.
        options: options of functions, by the names in the settings.
        deadline: seconds for a call of an async function, unless it has an attribute `deadline`; None there says that
            it keeps deadlines itself.
        progress: called after each call.
        columns: names that are no functions: their scores are given to `score`.

    Raises:
        ConfigError: a function does not import, an option is wrong, or a weight is not a finite number.
    """

    def __init__(
        self,
        setting: str | dict[str, float],
        name: str,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        deadline: float = 60.0,
        progress: Callable[[], None] = lambda: None,
        columns: Collection[str] = (),
    ) -> None:
        self._is_table = isinstance(setting, dict)
        self._weights = weights_of(setting, name)
        given = options or {}
        self.columns = [path for path in self._weights if path in columns]
        named = [path for path in self._weights if path not in columns]
        self._functions = {path: load_reward(path, name, given.get(path)) for path in named}
        self._takes = {path: parameters_of(function) for path, function in self._functions.items()}
        self._asyncs = {path for path, function in self._functions.items() if is_async(function)}
        self._thread = asyncio.Lock()
        self._deadline, self._progress = deadline, progress
        self.seconds: dict[str, float] = dict.fromkeys(self._functions, 0.0)
        self.calls = 0

    @property
    def is_async(self) -> bool:
        """Whether a function is async. Otherwise `score` never waits, and needs no event loop."""
        return bool(self._asyncs)

    @property
    def reads_samples(self) -> bool:
        """Whether a function reads more of a sample than its text."""
        return any(takes & {"sample", "samples"} for takes in self._takes.values())

    def metrics(self) -> dict[str, float]:
        """Mean seconds that each function takes for a row, and what functions measure themselves."""
        own = {f"{path}/seconds": spent / max(1, self.calls) for path, spent in self.seconds.items()}
        for path, function in self._functions.items():
            own |= {f"{path}/{name}": value for name, value in getattr(function, "metrics", dict)().items()}
        return own

    async def aclose(self) -> None:
        """Let functions with a method `aclose` release what they hold."""
        for function in self._functions.values():
            if (close := getattr(function, "aclose", None)) is not None:
                await close()

    async def score(
        self,
        texts: Sequence[str],
        prompt: Prompt,
        samples: Sequence[Sample] | None = None,
        columns: Mapping[str, Sequence[float | Score]] = MappingProxyType({}),
    ) -> list[Total]:
        """Return the scores of the samples of a row.

        Args:
            texts: `[n]`, what the model wrote.
            prompt: of the row.
            samples: `[n]`, needed if `reads_samples`.
            columns: `[n]` each, scores that roles have computed, by their names in the setting.

        Raises:
            RowError: a function did not return a finite number or score for each sample.
            TimeoutError: an async function took longer than the deadline.
        """
        calls = [self._called(path, function, texts, prompt, samples) for path, function in self._functions.items()]
        results = await together(calls) if self._asyncs else [await call for call in calls]
        self.calls += 1
        given = dict(zip(self._functions, results, strict=True))
        given |= {name: [total_of(value, name) for value in columns[name]] for name in self.columns}
        by_name = {path: given[path] for path in self._weights}
        return [self._sum({path: totals[i] for path, totals in by_name.items()}) for i in range(len(texts))]

    async def _called(
        self,
        path: str,
        function: RewardFunction,
        texts: Sequence[str],
        prompt: Prompt,
        samples: Sequence[Sample] | None,
    ) -> list[Total]:
        """Call one function for all samples."""
        begin = time.monotonic()
        takes = self._takes[path]
        if "completions" in takes:
            more = {"samples": samples} if "samples" in takes else {}
            values = await self._value(path, function, list(texts), prompt, more)
            if isinstance(values, str) or not hasattr(values, "__len__") or len(values) != len(texts):
                msg = f"reward {path} returned {values!r:.200} for {len(texts)} samples; return one value for each"
                raise RowError(msg)
        else:
            given: Sequence[Sample | None] = samples or [None] * len(texts)
            each = [{"sample": sample} if "sample" in takes else {} for sample in given]
            calls = [self._value(path, function, text, prompt, more) for text, more in zip(texts, each, strict=True)]
            # Without async functions one after the other, as they block.
            values = await together(calls) if path in self._asyncs else [await call for call in calls]
        self.seconds[path] += time.monotonic() - begin
        return [total_of(value, path) for value in values]

    async def _value(self, path: str, function: RewardFunction, text: Any, prompt: Prompt, more: Any) -> Any:
        if path in self._asyncs:
            value = await self._awaited(
                path, function(text, prompt, **more), getattr(function, "deadline", self._deadline)
            )
        elif self._asyncs:
            # Others go on waiting for their answers meanwhile.
            async with self._thread:
                value = await asyncio.to_thread(function, text, prompt, **more)
        else:
            value = function(text, prompt, **more)
        self._progress()
        return value

    async def _awaited(self, path: str, value: Awaitable[Any], deadline: float | None) -> Any:
        timeout = asyncio.timeout(deadline)
        try:
            async with timeout:
                return await value
        except TimeoutError as error:
            if not timeout.expired():
                raise
            msg = f"reward {path} gave no answer within {deadline:g} seconds (reward.deadline)"
            raise TimeoutError(msg) from error

    def _sum(self, parts: dict[str, Total]) -> Total:
        """Add a sample's weighted scores; a single function's components keep their names."""
        components = {path: part.reward for path, part in parts.items()} if self._is_table else {}
        tokens = None
        for path, part in parts.items():
            if twice := components.keys() & part.components.keys():
                msg = f"reward {path} has a component {min(twice)!r}, which another function has, too; rename it"
                raise RowError(msg)
            components |= part.components
            if part.tokens is not None:
                weighted = self._weights[path] * part.tokens
                if tokens is not None and len(tokens) != len(weighted):
                    msg = f"reward {path} gives rewards of {len(weighted)} tokens, another function of {len(tokens)}"
                    raise RowError(msg)
                tokens = weighted if tokens is None else tokens + weighted
        return Total(sum(self._weights[path] * part.reward for path, part in parts.items()), components, tokens)


def weights_of(setting: str | dict[str, float], name: str) -> dict[str, float]:
    """Return each function's weight in a setting; raises ConfigError."""
    if isinstance(setting, str):
        return {setting: 1.0}
    if not setting:
        msg = f"{name} names no reward; give at least one, as in {{ exact_match = 1.0 }}"
        raise ConfigError(msg)
    for path, weight in setting.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            msg = f"{name}: the weight of {path!r} is {weight!r}; give a finite number"
            raise ConfigError(msg)
    return {path: float(weight) for path, weight in setting.items()}


def check_options(options: Mapping[str, object], named: Sequence[str]) -> None:
    """Check that tables of options belong to the run's rewards; raises ConfigError."""
    if unknown := sorted(options.keys() - set(named)):
        msg = f"{OPTIONS}.{unknown[0]}: no reward of the run has this name; it has {', '.join(sorted(set(named)))}"
        raise ConfigError(msg)


def check_sandboxed(names: Sequence[str]) -> None:
    """Check that built-in functions work in the role's sandbox; raises ConfigError."""
    for name in names:
        if name in REWARDS.built_in and (why := getattr(REWARDS.load(name, "reward.function"), "not_in_sandbox", "")):
            msg = f'reward.isolation = "sandbox" with the reward {name}: {why}; write isolation = "none"'
            raise ConfigError(msg)


def token_rewards(totals: Sequence[Total], lengths: Sequence[int]) -> np.ndarray | None:
    """Return tokens' rewards, `[total] float32`, or None; raises RowError."""
    if all(total.tokens is None for total in totals):
        return None
    parts = []
    for i, (total, length) in enumerate(zip(totals, lengths, strict=True)):
        values = np.zeros(length) if total.tokens is None else total.tokens
        if len(values) != length:
            msg = f"a reward gives rewards of {len(values)} tokens for sample {i}, which has {length}"
            raise RowError(msg)
        parts.append(values)
    return np.concatenate(parts).astype(np.float32)
