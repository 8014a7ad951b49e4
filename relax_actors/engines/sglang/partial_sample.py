"""A sample in progress: the tokens received, and the request that continues it.

Invariant: tokens, log-probs and versions have the same length; the version of a token is that of the weights that
sampled it.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_actors.data.model_folder import MoeFacts
from relax_actors.engines.protocols.inference import Generation, GenerationRequest
from relax_actors.engines.protocols.stop_strings import START
from relax_actors.engines.protocols.watch import Watch
from relax_actors.engines.sglang.media_reference import MediaReferences, RequestMedia
from relax_actors.engines.sglang.server_arguments import stream_interval
from relax_actors.errors import ActorError, EngineError
from relax_actors.messages import FinishReason
from relax_actors.messages.experts import MISSING, invalid_reason

GREEDY_TOP_P = 1e-6
"""Keeps only the most likely token, and reports its log-prob at the request's temperature."""


class PartialSample:
    """One sample of a request, with its number in its group.

    `moe` is given if chosen experts are recorded, `media` for a model that takes any.
    """

    def __init__(
        self,
        request: GenerationRequest,
        number: int,
        moe: MoeFacts | None = None,
        media: RequestMedia | None = None,
    ) -> None:
        self.finish_reason: FinishReason | None = None
        self.moe, self._media = moe, media
        self._request = request
        self._is_greedy = request.is_greedy(number)
        self._experts: NDArray[Any] | None = None
        state = np.random.SeedSequence([request.seed, number]).generate_state(1, np.uint64)
        self._seed = int(state[0]) >> 1
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        # Number of tokens before the running request.
        self._offset = 0
        # Number of tokens received before weights changed during the running request; None if they did not. Only the
        # end of a request reports the versions of the tokens after them.
        self._certain: int | None = None
        self.is_stopped = False
        """Whether the tokens end with a stop string; later tokens of the request are ignored."""
        self.received = 0
        """Number of tokens that the server has sampled, ignored ones included."""
        # Number of tokens that were searched for stop strings, and the state after them.
        self._searched, self._state = 0, START
        # Number of tokens that the watch of the request has seen.
        self._shown = 0

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def prompt(self) -> list[int]:
        """Token ids that the next request continues: the prompt and the tokens generated so far."""
        return [*self._request.tokens.tolist(), *self._tokens]

    @property
    def media(self) -> str | None:
        """String that stands for the media of the prompt; None without media."""
        return None if self._media is None else self._media.reference

    def parameters(self) -> dict[str, Any]:
        """Return SGLang's sampling parameters of the next request.

        The random numbers of a seed depend on the position in the sequence, so a continued sample gets the same ones as
        an uninterrupted one.
        """
        request = self._request
        return {
            "max_new_tokens": request.max_tokens - len(self._tokens),
            "temperature": request.temperature,
            "top_p": GREEDY_TOP_P if self._is_greedy else request.top_p,
            "stop_token_ids": sorted(request.stop_ids),
            "ignore_eos": not request.stop_ids,
            "sampling_seed": self._seed,
            "stream_interval": self._stream_interval(),
            "ebnf": request.grammar or None,
            "logit_bias": None if self._media is None else self._media.logit_bias,
        }

    def _stream_interval(self) -> int:
        watch = self._request.watch
        return 1 if watch is not None and watch.wants_tokens else stream_interval(self._request.max_tokens)

    def request_started(self) -> None:
        """Note that a request for the remaining tokens is sent."""
        self._offset = self.received = len(self._tokens)
        self._certain = None

    @property
    def can_continue(self) -> bool:
        """Whether another request can continue the sample; a grammar begins with the first token of a request."""
        return not self._request.grammar

    def swapped(self) -> None:
        """Note that weights changed during the request.

        Tokens that follow may still be of the old weights.
        """
        if self._certain is None:
            self._certain = len(self._tokens)

    @property
    def was_swapped(self) -> bool:
        """Whether weights changed during the running request."""
        return self._certain is not None

    def add_chunk(self, chunk: Mapping[str, Any], version: int, named: Mapping[str, int]) -> bool:
        """Add a streamed message, with the tokens since the previous one; return whether it ends the request.

        `version` is that of the weights in use; `named` has versions by the names of their weights on the server.

        Raises:
            EngineError: the server failed, or the message is malformed.
            ActorError: the server used weights that this actor did not load.
        """
        meta, reason = chunk["meta_info"], chunk["meta_info"].get("finish_reason")
        self.received = self._offset + int(meta["completion_tokens"])
        # The message about an abort in the server's queue repeats the last token, with all log-probs.
        repeats = reason is not None and reason["type"] == "abort" and self.received <= len(self)
        if not self.is_stopped and not repeats:
            self._add_tokens(chunk["output_ids"], meta, version)
        if reason is None:
            return False
        self._set_versions(meta.get("weight_versions") or [], named)
        if reason["type"] != "abort" or self.is_stopped:
            self._finish(FinishReason.STOP if self.is_stopped else FinishReason(reason["type"]), meta)
        elif reason.get("status_code") and self._request.grammar:
            self._finish(FinishReason.ERROR, meta)
        elif reason.get("status_code"):
            msg = f"the server aborted a request: {reason.get('message')}"
            raise EngineError(msg)
        return True

    def _finish(self, reason: FinishReason, meta: Mapping[str, Any]) -> None:
        self.finish_reason = reason
        if self.moe is not None:
            self._experts = self._experts_of(meta, self.moe)

    def _add_tokens(self, tokens: list[int], meta: Mapping[str, Any], version: int) -> None:
        """Add the tokens of a message, up to the one in which a stop string ends."""
        scored = meta.get("output_token_logprobs") or []
        # A message has all tokens of the request, or those since the last message; both end at the same position.
        start = self._offset + int(meta["completion_tokens"]) - len(tokens)
        if len(scored) != len(tokens) or not self._offset <= start <= len(self._tokens):
            msg = (
                f"a server sent {len(tokens)} tokens with {len(scored)} log-probs from position {start}; "
                f"{len(self)} were received"
            )
            raise EngineError(msg)
        self._truncate(start)
        self._tokens += tokens
        self._logprobs += [float(entry[0]) for entry in scored]
        self._versions += [version] * len(tokens)
        self._find_stop()

    def _find_stop(self) -> None:
        """Search new tokens for stop strings; drop the tokens after the first in which one ends."""
        strings = self._request.stop_strings
        if strings is None:
            return
        while not self.is_stopped and self._searched < len(self._tokens):
            self._state, has_ended = strings.advance(self._state, self._tokens[self._searched])
            self.is_stopped = has_ended and self._searched >= self._request.min_tokens
            self._searched += 1
        if self.is_stopped:
            self._truncate(self._searched)

    def _truncate(self, length: int) -> None:
        """Keep the first tokens only."""
        del self._tokens[length:], self._logprobs[length:], self._versions[length:]
        if length < self._searched:
            self.is_stopped, self._searched, self._state = False, 0, START

    def _experts_of(self, meta: Mapping[str, Any], moe: MoeFacts) -> NDArray[Any]:
        """Decode the experts reported by the last request, which prefilled all tokens before it.

        Tokens of older weights were sampled with experts that no answer reports: they are marked as missing. So are all
        tokens of a sample with a stop string that was aborted in the server's queue, or whose server was lost.
        """
        text = meta.get("routed_experts") or ""
        if self.is_stopped and not text:
            return np.full((len(self.prompt) - 1, moe.layers, moe.experts_of_token), MISSING, np.int16)
        read = len(self._request.tokens) + self._offset + int(meta["completion_tokens"]) - 1
        experts = routed_experts(text, read, moe)[: len(self.prompt) - 1].copy()
        versions = np.array(self._versions)
        experts[len(self._request.tokens) - 1 :][versions != versions[-1]] = MISSING
        return experts

    def _set_versions(self, spans: Sequence[Mapping[str, Any]], named: Mapping[str, int]) -> None:
        """Set the versions of this request's tokens from the server's report."""
        for span in spans:
            if span["version"] not in named:
                msg = (
                    f"the server generated with weights {span['version']!r}, which this actor did not load; "
                    "a server of rollout.sglang.urls is for one rollout actor of one run"
                )
                raise ActorError(msg)
            for position in range(self._offset + span["start"], min(self._offset + span["end"], len(self._tokens))):
                self._versions[position] = named[span["version"]]

    def request_broken(self, *, keep: bool) -> None:
        """Drop tokens of uncertain version after a broken request; unless `keep`, start again."""
        self.finish_reason = None
        keep = keep and self.can_continue
        kept = (len(self._tokens) if self._certain is None else self._certain) if keep else 0
        self._truncate(kept)
        if self.is_stopped:
            self._finish(FinishReason.STOP, {})

    def inform(self, watch: Watch) -> None:
        """Show the tokens that are new since the last call."""
        start = min(self._shown, len(self._tokens))
        if tokens := self._tokens[start:]:
            watch.on_tokens(start, np.array(tokens, np.int32), np.array(self._logprobs[start:], np.float32))
        self._shown = len(self._tokens)

    def cancel(self) -> None:
        """End the sample with the tokens that it has."""
        self.finish_reason = self.finish_reason or FinishReason.LENGTH

    def result(self) -> Generation:
        """Return the finished sample."""
        assert self.finish_reason is not None  # noqa: S101 called after the sample has ended
        return Generation(
            np.array(self._tokens, np.int32),
            np.array(self._logprobs, np.float32),
            np.array(self._versions, np.int32),
            self.finish_reason,
            self._experts,
        )


def routed_experts(text: str, tokens: int, moe: MoeFacts) -> NDArray[Any]:
    """Decode the chosen experts, `[tokens, layers, experts_of_token] int16`.

    Args:
        text: `meta_info["routed_experts"]` of an answer: base64 of int32.
        tokens: number of tokens of prompt and completion without the last one, which no layer has read.
        moe: of the model.

    Raises:
        EngineError: the shape is wrong, or no router of the model can have chosen these experts.
    """
    # SGLang reports all layers, including those without experts.
    shape = tokens, moe.layers + len(moe.without), moe.experts_of_token
    try:
        chosen = np.frombuffer(base64.b64decode(text, validate=True), "<i4").reshape(shape)
    except ValueError as error:
        msg = f"a server sent routed experts that are not {list(shape)}: {error}"
        raise EngineError(msg) from error
    chosen = np.delete(chosen, moe.without, 1).astype(np.int16)
    if why := invalid_reason(chosen, moe.experts):
        msg = f"a server sent routed experts that are not valid: {why}"
        raise EngineError(msg)
    return chosen


class ActiveRows:
    """Requests with the samples generated so far; see `PartialSample`."""

    def __init__(self, moe: MoeFacts | None = None, media: MediaReferences | None = None) -> None:
        self._moe, self._media = moe, media
        self._added = self._finished_tokens = 0
        self._watched: dict[int, Watch] = {}
        self.active: dict[int, list[PartialSample]] = {}
        """Samples of each row that was not returned yet."""

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Add rows."""
        for request in requests:
            media = None if self._media is None else self._media.of(request.tokens, request.media)
            self.active[self._added] = [PartialSample(request, i, self._moe, media) for i in range(request.samples)]
            if request.watch is not None:
                self._watched[self._added] = request.watch
            self._added += 1

    @property
    def samples(self) -> list[PartialSample]:
        """Samples of all active rows."""
        return [sample for group in self.active.values() for sample in group]

    @property
    def tokens(self) -> int:
        """Number of tokens generated for all rows, active and finished."""
        return self._finished_tokens + sum(map(len, self.samples))

    def inform(self) -> list[int]:
        """Show new tokens to the watches of rows; return the rows that nobody waits for."""
        for i, watch in self._watched.items():
            if watch.wants_tokens:
                self.active[i][0].inform(watch)
        return [i for i, watch in self._watched.items() if watch.is_cancelled]

    def finish(self, i: int) -> tuple[int, list[Generation]]:
        """Remove row `i`, all of whose samples have ended; return its number and its samples."""
        group = self.active.pop(i)
        self._watched.pop(i, None)
        self._finished_tokens += sum(map(len, group))
        return i, [sample.result() for sample in group]
