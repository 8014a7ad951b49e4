"""Plausibility checks of rows: malformed rows are quarantined before any engine."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from broker.codec import Array
from relax_actors.config import Config
from relax_actors.data.model_folder import measure
from relax_actors.media.family import family_of
from relax_actors.messages import Advantage, Prompt, TeacherScores, Trajectory
from relax_actors.messages.experts import expand, invalid_reason

MAX_ADVANTAGE = 1e6
SAMPLES = {"examples": (1,), "pairs": (2,), "labelled": (1, 2), "steps": (1,)}
"""Samples of a row from the data, by `algorithm.rows`."""
MAX_LOGPROB = 0.1
"""Largest accepted log-prob: rounding can make the log-prob of a certain token slightly positive."""


def mismatched_version(trajectory: Trajectory, published: Mapping[int, str]) -> int | None:
    """Return the oldest version whose fingerprint in a trajectory differs from the published.

    Versions without a published fingerprint are not compared.
    """
    for version, fingerprint in trajectory.fingerprint_by_version.items():
        if published.get(version, fingerprint) != fingerprint:
            return version
    return None


class RowValidator:
    """Checks rows against the limits of the model and the run.

    Every method returns the reason why a row is malformed, or an empty string if it is not.
    """

    def __init__(self, config: Config) -> None:
        facts = measure(config.model_path)
        self._vocabulary = facts.vocabulary
        self._context, self._budget = facts.context_length, config.trainer.max_tokens_per_microbatch
        self._steps = config.run.steps
        self._moe = facts.moe if config.trainer.router_replay else None
        self._needs_returns = config.critic is not None
        self._rows = config.algorithm.rows
        self._scores = config.algorithm.scores if config.algorithm.trains_scores else None
        family = None if config.media is None else family_of(config.model_path)
        self._barred = () if family is None else family.barred

    def of_prompt(self, prompt: Prompt) -> str:
        """Return why samples cannot be generated from a prompt."""
        length, room = len(prompt.tokens), self._context - 1
        if not 0 < length <= room:
            return f"the prompt has {length} tokens; the model's context leaves 1 to {room}"
        if prompt.min_version > self._steps:
            return f"the prompt requires weights {prompt.min_version}; the run has {self._steps} steps"
        return self._outside_vocabulary(prompt.tokens, "the prompt's tokens")

    def of_row(self, trajectory: Trajectory, advantage: Advantage, step: int) -> str:
        """Return why a row cannot be trained in a step."""
        n, total = len(trajectory.texts), len(trajectory.token_ids)
        given = [len(advantage.values), *([] if advantage.correct is None else [len(advantage.correct)])]
        if given[0] not in (n, total) or given[1:] not in ([], [n]):
            return f"there are {' and '.join(map(str, given))} advantages for {n} samples with {total} tokens"
        if advantage.lengths is not None and not np.array_equal(advantage.lengths, trajectory.sample_lengths):
            return f"token rewards are for samples of {advantage.lengths[:8].tolist()} tokens, the samples have others"
        if advantage.returns is None and self._needs_returns:
            return "the advantages have no returns, which the critic is trained on; the role advantages must write them"
        if advantage.returns is not None and len(advantage.returns) != total:
            return f"there are {len(advantage.returns)} returns for {total} tokens"
        if np.abs(advantage.values.astype(np.float64)).max(initial=0) > MAX_ADVANTAGE:
            return f"an advantage is over {MAX_ADVANTAGE:g}; scale the rewards"
        return self.of_trajectory(trajectory, step)

    def of_teacher(self, teacher: TeacherScores, trajectory: Trajectory, top_k: int) -> str:
        """Return why a teacher's scores do not fit the trained tokens of a row."""
        return teacher.problem(trajectory.trained, top_k, self._vocabulary)

    def of_trajectory(self, trajectory: Trajectory, step: int) -> str:
        """Return why a row of a step cannot be passed through the model."""
        if not len(trajectory.prompt_tokens):
            return "the prompt has no tokens"
        if (longest := max(trajectory.sequence_lengths)) > min(self._context, self._budget):
            return f"a sequence has {longest} tokens, more than the context or trainer.max_tokens_per_microbatch"
        return self._of_tokens(trajectory, step) or self._of_barred(trajectory) or self._of_experts(trajectory)

    def _of_barred(self, trajectory: Trajectory) -> str:
        """Return why tokens cannot have been sampled; empty if they can."""
        if not self._barred:
            return ""
        sampled = trajectory.token_ids[trajectory.trained]
        if len(wrong := sampled[np.isin(sampled, self._barred)]):
            return f"a sample has the token {int(wrong[0])}, which stands for media and is never sampled"
        return ""

    def _of_tokens(self, trajectory: Trajectory, step: int) -> str:
        logprobs, versions = trajectory.logprobs, trajectory.versions
        if trajectory.is_sampled != (self._rows == "sampled"):
            who = "a policy" if trajectory.is_sampled else "no policy"
            return f"{who} sampled its tokens, and algorithm.rows = {self._rows!r}"
        if (n := len(trajectory.texts)) not in SAMPLES.get(self._rows, (n,)):
            return f"it has {n} samples, which no row of algorithm.rows = {self._rows!r} has"
        if why := self._of_targets(trajectory):
            return why
        if not (logprobs <= MAX_LOGPROB).all() or not (logprobs > np.finfo(np.float32).min).all():
            return "a log-prob is positive or not finite"
        if versions.min() < -1 or int(versions.max()) > step:
            return f"the version of a token is not from 0 to {step}"
        return self._outside_vocabulary(trajectory.prompt_tokens, "the prompt's tokens") or self._outside_vocabulary(
            trajectory.token_ids, "the samples' tokens"
        )

    def _of_targets(self, trajectory: Trajectory) -> str:
        if (trajectory.targets is None) != (self._scores is None):
            return "targets of scores are in the rows of a run that trains a reward model, and in no others"
        if trajectory.targets is None or self._scores is None or self._rows == "pairs":
            return ""
        labels, classes = trajectory.targets[trajectory.trained], max(2, self._scores.classes)
        if len(wrong := labels[~np.isin(labels, np.arange(classes))]):
            return f"the label {wrong[0]:g} is none of the {classes} classes"
        return ""

    def _of_experts(self, trajectory: Trajectory) -> str:
        moe, prompt, routed = self._moe, trajectory.prompt_experts, trajectory.routed_experts
        if moe is None:
            return ""
        if prompt is None or routed is None:
            return "the rollout has not recorded experts, which trainer.router_replay needs"
        if routed.shape[1:] != (moe.layers, moe.experts_of_token):
            shape = list(routed.shape)
            return f"experts have shape {shape}, not {moe.layers} layers with {moe.experts_of_token} per token"
        return next((why for part in (prompt, routed) if (why := invalid_reason(expand(part), moe.experts))), "")

    def _outside_vocabulary(self, tokens: Array, what: str) -> str:
        if int(tokens.min()) < 0 or int(tokens.max()) >= self._vocabulary:
            return f"{what} are not all in the model's vocabulary of {self._vocabulary}"
        return ""
