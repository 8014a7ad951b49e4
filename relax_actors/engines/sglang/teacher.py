"""A teacher in an SGLang server, which scores token sequences that the student sampled."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import numpy as np

from relax_actors.engines.protocols.samples import TrainSample
from relax_actors.engines.protocols.scoring import Scores
from relax_actors.errors import ActorError, RowError

CONNECT_SECONDS, ANSWER_SECONDS, RETRY_SECONDS = 5.0, 300.0, 0.5
OK, FIRST_SERVER_ERROR = 200, 500


class SglangTeacher:
    """Client of a server whose weights do not change; implements `TeacherEngine`.

    The server needs no special options. It computes log-probs of given tokens at temperature 1. A server that does not
    answer is waited for `patience` seconds, or until `stopping` returns true.
    """

    def __init__(self, url: str, key: str, patience: float, stopping: Callable[[], bool]) -> None:
        self._url, self._patience, self._stopping = url, patience, stopping
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS)
        self._client = httpx.Client(base_url=url, headers=headers, timeout=timeout, verify=url.startswith("https:"))

    @property
    def version(self) -> int:
        """Version of the weights, which never change."""
        return 0

    def score_top(self, samples: Sequence[TrainSample], top_k: int, progress: Callable[[], None]) -> list[Scores]:
        """Compute log-probs of each sequence and of the most likely tokens; see `TeacherEngine`."""
        # From the token before the first trained one: SGLang scores the tokens after this position.
        starts = [int(np.flatnonzero(sample.loss_mask)[0]) for sample in samples]
        body = {
            "input_ids": [sample.token_ids.tolist() for sample in samples],
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": [start - 1 for start in starts],
            "top_logprobs_num": top_k,
        }
        answers = self._generate(body, progress)
        if len(answers) != len(samples):
            msg = f"the teacher at {self._url} gave {len(answers)} answers for {len(samples)} sequences"
            raise ActorError(msg)
        scores = []
        for sample, start, answer in zip(samples, starts, answers, strict=True):
            scores.append(self._scores(sample, start, answer["meta_info"], top_k))
        return scores

    def _scores(self, sample: TrainSample, start: int, meta: dict[str, Any], top_k: int) -> Scores:
        """Read the log-probs of a sequence; the first entry is of position `start - 1`, which is not scored."""
        scored = meta["input_token_logprobs"][1:]
        if [entry[1] for entry in scored] != sample.token_ids[start:].tolist():
            msg = (
                f"the teacher at {self._url} scored other tokens than it was sent; its tokenizer must be the student's"
            )
            raise ActorError(msg)
        mask = sample.loss_mask
        logprobs = np.zeros(len(sample), np.float32)
        logprobs[start:] = [entry[0] for entry in scored]
        logprobs[~mask] = 0.0
        ids, top = np.zeros((sample.trained, top_k), np.int32), np.zeros((sample.trained, top_k), np.float32)
        if top_k:
            rows = [row for row, trained in zip(meta["input_top_logprobs"][1:], mask[start:], strict=True) if trained]
            ids[:] = [[entry[1] for entry in row] for row in rows]
            top[:] = [[entry[0] for entry in row] for row in rows]
        if not np.isfinite(logprobs).all() or not np.isfinite(top).all():
            msg = f"the teacher at {self._url} gave a log-prob that is not finite"
            raise RowError(msg)
        return Scores(logprobs, ids, top)

    def _generate(self, body: dict[str, Any], progress: Callable[[], None]) -> list[dict[str, Any]]:
        """Make the request, and repeat it within the patience; raises ActorError if that fails."""
        end = time.monotonic() + self._patience
        while True:
            try:
                answer = self._client.post("/generate", json=body)
            except httpx.TransportError as error:
                why = str(error) or type(error).__name__
            else:
                if answer.status_code == OK:
                    answers: list[dict[str, Any]] = answer.json()
                    return answers
                why = f"{answer.status_code}: {answer.text[:500]}"
                if answer.status_code < FIRST_SERVER_ERROR:
                    msg = f"the teacher at {self._url} refuses the request ({why})"
                    raise ActorError(msg)
            if time.monotonic() > end or self._stopping():
                msg = f"the teacher at {self._url} does not answer within {self._patience:g} s ({why}); start it again"
                raise ActorError(msg)
            time.sleep(RETRY_SECONDS)
            progress()

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
