"""Models of a judge: one scores the possible answers, one writes reason and answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from relax_actors.data.tokenizer import Tokenizer
from relax_actors.engines.protocols.inference import GenerationRequest, InferenceEngine
from relax_actors.errors import EngineError
from relax_actors.messages import FinishReason

if TYPE_CHECKING:  # imports torch
    from relax_actors.engines.torch.scorer import FrozenScorer

Prompts = Sequence[NDArray[np.int32]]


class JudgeModel(Protocol):
    """Answers prompts with numbers from 0 to 1; the same prompts in one call give the same bits."""

    def answers(self, prompts: Prompts, progress: Callable[[], None]) -> list[float | Exception]:
        """Return the answer to each prompt, or why the model gave none."""

    def close(self) -> None:
        """Release the model."""


class ChoosingModel:
    """Model that scores choices by their log-probs; implements `JudgeModel`.

    Args:
        engine: the model.
        choices: `[len] int32`, tokens of each answer.
        values: what each answer means, from 0 to 1.
        expects: whether to return the mean of the values, weighted by the probabilities of the answers among the
            choices (G-Eval, arXiv 2303.16634, equation 1), and not the value of the most likely one.
    """

    def __init__(
        self, engine: FrozenScorer, choices: Sequence[NDArray[Any]], values: Sequence[float], *, expects: bool
    ) -> None:
        self._engine, self._choices, self._expects = engine, choices, expects
        self._values = np.asarray(values, np.float64)

    def answers(self, prompts: Prompts, progress: Callable[[], None]) -> list[float | Exception]:
        """Return the value of the chosen answers, or the expected values; see `JudgeModel`."""
        return [self._answer(row) for row in self._engine.logprobs(prompts, self._choices, progress)]

    def _answer(self, logprobs: NDArray[Any]) -> float | Exception:
        if not np.isfinite(logprobs).all():
            return EngineError(f"the judge's log-probs of its answers are not finite: {logprobs[:8].tolist()}")
        if not self._expects:
            return float(self._values[logprobs.argmax()])
        weights = np.exp(logprobs - logprobs.max())
        return float(weights @ self._values / weights.sum())

    def close(self) -> None:
        """Release the model."""
        self._engine.close()


class WritingModel:
    """Model that writes a reason and a verdict in a grammar; implements `JudgeModel`.

    Args:
        engine: the model.
        tokenizer: its tokenizer.
        grammar: form of the object.
        max_tokens: tokens of an answer at most.
        read: returns the value of an answer, from 0 to 1; raises ValueError if it has none.
        batch: prompts that are generated for at once.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        tokenizer: Tokenizer,
        grammar: str,
        max_tokens: int,
        read: Callable[[str], float],
        batch: int,
    ) -> None:
        self._engine, self._tokenizer, self._grammar = engine, tokenizer, grammar
        self._max_tokens, self._read, self._batch = max_tokens, read, batch
        engine.prepare(grammar)

    def answers(self, prompts: Prompts, progress: Callable[[], None]) -> list[float | Exception]:
        """Return the verdict of the most likely answer to each prompt; see `JudgeModel`."""
        values: list[float | Exception] = []
        for start in range(0, len(prompts), self._batch):
            requests = [self._request(prompt) for prompt in prompts[start : start + self._batch]]
            written: dict[int, float | Exception] = {}
            for done in self._engine.stream(requests, progress):
                for i, (generation,) in done:
                    written[i] = self._verdict(generation.tokens, generation.finish_reason)
            values += [written[i] for i in range(len(requests))]
        return values

    def _request(self, prompt: NDArray[np.int32]) -> GenerationRequest:
        return GenerationRequest(
            prompt,
            seed=0,
            samples=1,
            temperature=1.0,
            top_p=1.0,
            max_tokens=self._max_tokens,
            stop_ids=self._tokenizer.stop_ids,
            greedy_samples=1,
            grammar=self._grammar,
        )

    def _verdict(self, tokens: NDArray[Any], reason: FinishReason) -> float | Exception:
        text = self._tokenizer.decode(tokens)
        try:
            return self._read(text)
        except ValueError as error:
            return EngineError(f"{error} (it ended by {reason})")

    def close(self) -> None:
        """Release the model."""
        self._engine.close()
