"""A sample as it grows: what a server has told of it, and what it must be asked for to go on.

Invariant: tokens, log-probs and versions are of one length; a token's version is that of the weights that chose it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_actors.data.model_folder import MoeFacts
from relax_actors.engines.protocols.inference import Generation, GenerationRequest
from relax_actors.engines.sglang.arguments import stream_interval
from relax_actors.engines.sglang.experts import routed_experts
from relax_actors.errors import ActorError, EngineError
from relax_actors.messages import FinishReason
from relax_actors.messages.experts import MISSING

ONE_TOKEN = 1e-6
"""As top-p: the likeliest token alone, with its log-prob at the request's temperature."""


class Sample:
    """One sample of a request.

    Args:
        request: the prompt and how to sample from it.
        number: which of its samples.
        moe: of the model, if the experts that it chooses are to be told.
    """

    def __init__(self, request: GenerationRequest, number: int, moe: MoeFacts | None = None) -> None:
        self.finish_reason: FinishReason | None = None
        self.moe = moe
        self._request = request
        self._experts: NDArray[Any] | None = None
        state = np.random.SeedSequence([request.seed, number]).generate_state(1, np.uint64)
        self._seed = int(state[0]) >> 1
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        # Of the request that runs: where its tokens begin, and how many came before weights changed under it.
        self._from = 0
        self._sure: int | None = None

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def prompt(self) -> list[int]:
        """What a server is to go on from."""
        return [*self._request.tokens.tolist(), *self._tokens]

    def parameters(self) -> dict[str, Any]:
        """How a server is to sample from there. A seed's random numbers depend on the place in the sequence, so a
        sample that goes on has those that it would have had.
        """
        request = self._request
        return {
            "max_new_tokens": request.max_tokens - len(self._tokens),
            "temperature": request.temperature,
            "top_p": ONE_TOKEN if request.greedy else request.top_p,
            "stop_token_ids": sorted(request.stop_ids),
            "ignore_eos": not request.stop_ids,
            "sampling_seed": self._seed,
            "stream_interval": stream_interval(request.max_tokens),
        }

    def begin(self) -> None:
        """A request for what it lacks is sent."""
        self._from, self._sure = len(self._tokens), None

    def swapped(self) -> None:
        """Weights have changed while its request runs: of the tokens to come, some may be of those before."""
        if self._sure is None:
            self._sure = len(self._tokens)

    @property
    def was_swapped(self) -> bool:
        """Whether weights have changed under the request that runs."""
        return self._sure is not None

    def take(self, chunk: Mapping[str, Any], version: int, named: Mapping[str, int]) -> bool:
        """Take in what a server tells of it; gives whether that is the end of its request.

        Args:
            chunk: a part of the answer, with the tokens since the one before.
            version: of the weights in use.
            named: versions by the name that their weights were given.

        Raises:
            EngineError: the server failed.
            ActorError: it used weights that this actor did not give it.
        """
        meta = chunk["meta_info"]
        tokens = chunk["output_ids"]
        scored = meta.get("output_token_logprobs") or []
        # An answer tells all tokens so far, or those since the last: either way it ends at the same place.
        start = self._from + int(meta["completion_tokens"]) - len(tokens)
        if len(scored) != len(tokens) or not self._from <= start <= len(self._tokens):
            msg = (
                f"a server told {len(tokens)} tokens with {len(scored)} log-probs from {start} on; here are {len(self)}"
            )
            raise EngineError(msg)
        del self._tokens[start:], self._logprobs[start:], self._versions[start:]
        self._tokens += tokens
        self._logprobs += [float(entry[0]) for entry in scored]
        self._versions += [version] * len(tokens)
        reason = meta.get("finish_reason")
        if reason is None:
            return False
        self._date(meta.get("weight_versions") or [], named)
        if reason["type"] != "abort":
            self.finish_reason = FinishReason(reason["type"])
            if self.moe is not None:
                self._experts = self._experts_of(meta.get("routed_experts") or "", self.moe)
        elif reason.get("status_code"):
            msg = f"the server gave a request up: {reason.get('message')}"
            raise EngineError(msg)
        return True

    def _experts_of(self, text: str, moe: MoeFacts) -> NDArray[Any]:
        """The experts that the last request told; it has read all that came before it.

        If that was with newer weights, these did not give the tokens of older ones; nobody knows what did.
        """
        found = routed_experts(text, len(self.prompt) - 1, moe)
        versions = np.array(self._versions)
        found[len(self._request.tokens) - 1 :][versions != versions[-1]] = MISSING
        return found

    def _date(self, spans: Sequence[Mapping[str, Any]], named: Mapping[str, int]) -> None:
        """Put down who wrote the tokens of this request, as the server says."""
        for span in spans:
            if span["version"] not in named:
                msg = (
                    f"the server generated with weights {span['version']!r}, which it was not given by this actor; "
                    "a server of rollout.sglang.urls is for one rollout actor of one run"
                )
                raise ActorError(msg)
            for place in range(self._from + span["start"], min(self._from + span["end"], len(self._tokens))):
                self._versions[place] = named[span["version"]]

    def cut_off(self, *, keep: bool) -> None:
        """Its request broke off; what is left is what can be dated, or with `keep` unset nothing."""
        left = (len(self._tokens) if self._sure is None else self._sure) if keep else 0
        del self._tokens[left:], self._logprobs[left:], self._versions[left:]

    def result(self) -> Generation:
        """The sample, which has ended."""
        assert self.finish_reason is not None  # noqa: S101 asked for when all have ended
        return Generation(
            np.array(self._tokens, np.int32),
            np.array(self._logprobs, np.float32),
            np.array(self._versions, np.int32),
            self.finish_reason,
            self._experts,
        )
