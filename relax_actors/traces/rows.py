"""Traces of a row's cells, and the trajectory of the traces of a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_actors.messages import Prompt, Reward, Sample, Trajectory
from relax_actors.messages.samples import NOT_SAMPLED, TokenSequence
from relax_actors.traces.model import Trace, TraceError

Array = NDArray[Any]
REWARD = "recorded_reward"
"""Metric of a sample whose reward a trace recorded; its components have the metrics `recorded_reward/<name>`."""


def traces_of(prompt: Prompt, trajectory: Trajectory, reward: Reward | None = None, **facts: Any) -> list[Trace]:
    """Return a row's traces, one a sample, without experts and features.

    Args:
        prompt: its prompt.
        trajectory: its samples.
        reward: their rewards; None if they have none.
        facts: further fields that all traces have: `run`, `row`, `step`, `author`, `tools`; and `token_values`, with
            arrays of `[total]` as the trajectory lays its tokens out.
    """
    values: dict[str, Array] = dict(facts.pop("token_values", {}))
    if reward is not None and reward.token_values is not None:
        values["reward"] = reward.token_values
    if trajectory.entropies is not None:
        values["entropy"] = trajectory.entropies
    ends = np.cumsum(trajectory.sample_lengths)
    begins, n = ends - trajectory.sample_lengths, len(trajectory.texts)
    known, traces = trajectory.fingerprint_by_version, []
    for i, sample in enumerate(trajectory.samples):
        versions = {int(version) for version in sample.versions}
        own = {
            "reward": None if reward is None else float(reward.values[i]),
            "components": {} if reward is None else {name: float(v[i]) for name, v in reward.components.items()},
            "token_values": {
                name: each[begins[i] : ends[i]].astype(np.float32)
                for name, each in values.items()
                if len(each) == len(trajectory.token_ids)
            },
            "fingerprints": {version: known[version] for version in sorted(versions & known.keys())},
        }
        traces.append(
            Trace(
                **(facts | own),
                sample=i,
                prompt_tokens=trajectory.prompt_tokens,
                sequences=tuple(
                    replace(each, routed_experts=None, observed=(), entropies=None) for each in sample.sequences
                ),
                text=sample.text,
                finish_reason=str(sample.finish_reason),
                turn_rewards=sample.turn_rewards,
                metrics=dict(sample.metrics),
                prompt=prompt.text,
                answer=prompt.answer,
                metadata=dict(prompt.metadata),
                prompt_messages=list(prompt.messages),
                messages=list(sample.messages),
                media=(*prompt.media, *(m for s in sample.sequences for seen in s.observed for m in seen.sources)),
                greedy=i >= n - trajectory.greedy_samples,
            )
        )
    return traces


def trajectory_of(traces: Sequence[Trace], version: int | None = None) -> Trajectory:
    """Return the trajectory of all traces of a row, in order.

    `version` takes the place of the recorded versions of sampled tokens, without fingerprints: in a run that trains on
    traces, no version of this run sampled them.

    Raises:
        TraceError: the traces have different prompts, or are no samples of one row.
    """
    first = traces[0]
    if odd := next((t for t in traces if not np.array_equal(t.prompt_tokens, first.prompt_tokens)), None):
        msg = (
            f"{odd.origin or odd.name}: its prompt has other tokens than that of {first.origin or first.name}, and "
            "both are samples of one row; give them different rows"
        )
        raise TraceError(msg)
    greedy = [trace.greedy for trace in traces]
    if greedy != sorted(greedy):
        msg = f"{first.origin or first.name}: a greedy sample comes before others of its row; write it behind them"
        raise TraceError(msg)
    known = {v: text for trace in traces for v, text in trace.fingerprints.items()}
    samples = [_sample(trace, version) for trace in traces]
    try:
        trajectory = Trajectory.of(first.prompt_tokens, samples, known if version is None else None)
        return replace(trajectory, greedy_samples=sum(greedy)) if any(greedy) else trajectory
    except (OverflowError, RecursionError, TypeError, ValueError) as error:
        msg = f"{first.origin or first.name}: {error}"
        raise TraceError(msg) from error


def _sample(trace: Trace, version: int | None) -> Sample:
    sequences = trace.sequences if version is None else tuple(_with_version(s, version) for s in trace.sequences)
    metrics: Mapping[str, float] = trace.metrics
    if version is not None and trace.reward is not None:
        parts = {f"{REWARD}/{name}": value for name, value in trace.components.items()}
        metrics = {**metrics, REWARD: trace.reward, **parts}
    return Sample(sequences, trace.text, trace.finish_reason, metrics, trace.turn_rewards, trace.messages)


def _with_version(sequence: TokenSequence, version: int) -> TokenSequence:
    versions = np.where(sequence.sampled, version, NOT_SAMPLED).astype(np.int32)
    return replace(sequence, versions=versions)
