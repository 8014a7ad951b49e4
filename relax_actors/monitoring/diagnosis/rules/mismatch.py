"""Rules about log-probs of rollout and trainer, and the distance of policies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from relax_actors.monitoring.diagnosis.observations import Observations
from relax_actors.monitoring.diagnosis.rule import rule
from relax_actors.monitoring.diagnosis.statistics import ends, level, rank_correlation, values
from relax_actors.monitoring.finding import Finding

FIRST, STEPS = 3, 6
DISAGREE = 0.05
"""Mean |trainer - rollout| log-prob at the same weights from which the engines disagree. Rounding to bfloat16 gives
0.01 to 0.02."""
DISAGREE_FLOAT8 = 0.25
"""The same where servers hold weights in float8; rounding then gives nine times as much (`benchmarks/precision.py`)."""
DRIFT = 0.5
"""Nats a token from which a policy has drifted far from its reference."""
LOW_SHARE = 0.3


def on_policy(seen: Observations) -> dict[int, dict[str, float]]:
    """Return the steps that train rows of their own weights, if each is one update."""
    if _is_taught(seen):
        return {}
    updates = int(seen.setting("trainer.minibatches", 1)) * int(seen.setting("trainer.epochs", 1))
    return {
        step: figures
        for step, figures in seen.steps.items()
        if updates == 1 and figures.get("staleness") == 0 and figures.get("span", 1.0) <= 1 and "abs_delta" in figures
    }


@rule("Rollout and trainer give the same tokens other log-probs from the first step on.", "arXiv 2510.26788")
def engines_disagree(seen: Observations) -> Iterator[Finding]:
    """Look at the first steps at the same weights, the very first one included."""
    first = seen.series("abs_delta", of=on_policy(seen))[:FIRST]
    limit = DISAGREE if seen.setting("rollout.sglang.quantization", "none") == "none" else DISAGREE_FLOAT8
    if first and first[0][0] < STEPS and min(values(first)) > limit:
        yield Finding(
            f"at the same weights, log-probs of rollout and trainer differ by {level(first):.3f} a token from the "
            "start",
            evidence=(seen.of_steps((first[0][0], first[-1][0]), abs_delta=level(first)),),
            remedy="check that the rollout returns log-probs at rollout.temperature and of the whole vocabulary, and "
            "the precision of both engines; an off-policy correction hides it only",
            settings=("rollout.temperature", "trainer.precision", "model.fp32_lm_head", "algorithm.correction.kind"),
        )


@rule(
    "Rollout and trainer agree at first and drift apart: new weights, an adapter or a flushed cache never arrive.",
    "verl-project/verl#7495",
)
def weights_not_refreshed(seen: Observations) -> Iterator[Finding]:
    """Find engines that agree on the first weights alone, or a mismatch that only grows."""
    exact = on_policy(seen)
    series = seen.series("abs_delta", of=exact if len(exact) >= STEPS else _most_frequent(seen))
    compared = ends(series, least=2)
    if compared is None or len(series) < STEPS:
        return
    if len(exact) >= STEPS:
        first, last = series[0][1], min(values(series[-FIRST:]))
        # The trainer's log-probs are those of its forward pass: dropout moves them, the more the larger the adapter is.
        least = DRIFT if seen.setting("lora.dropout", 0.0) else DISAGREE
        is_stale = last > max(least, 5.0 * first)
    else:  # newer weights than those of the samples explain a part of the mismatch, but not that it grows
        first, last = compared
        trend = rank_correlation([float(step) for step, _ in series], values(series))
        is_stale = last > max(DRIFT, 5.0 * first) and trend > 0.8  # noqa: PLR2004
    if is_stale:
        yield Finding(
            f"log-probs of rollout and trainer agreed within {first:.4f} a token at first and differ by {last:.3f} "
            "now, although the rollout reports new versions",
            evidence=(seen.of_steps((series[0][0], series[-1][0]), first=first, last=last),),
            remedy="the rollout computes with older weights than it reports: check that its engine loads every "
            "version (adapters included) and drops cached prefixes of earlier ones",
            settings=("rollout.backend", "weights.transport"),
        )


def _is_taught(seen: Observations) -> bool:
    """Whether a teacher writes samples, whose log-probs are its own."""
    return bool(seen.setting("algorithm.distil.student_share", 1.0) < 1)


def _most_frequent(seen: Observations) -> dict[int, dict[str, float]]:
    if _is_taught(seen):
        return {}
    counts = Counter(figures["staleness"] for figures in seen.steps.values() if "staleness" in figures)
    if not counts:
        return {}
    usual = counts.most_common(1)[0][0]
    return {step: figures for step, figures in seen.steps.items() if figures.get("staleness") == usual}


@rule(
    "Log-probs disagree at one end of the context: positions, windows, or a cached prefix.", "vllm-project/vllm#42125"
)
def disagreement_by_depth(seen: Observations) -> Iterator[Finding]:
    """Compare the mismatch of the earlier and the later half of the samples at the same weights."""
    exact = on_policy(seen)
    early, late = (seen.series(f"abs_delta_{part}", of=exact)[-10:] for part in ("early", "late"))
    if len(early) < FIRST or len(late) < FIRST:
        return
    a, b = level(early), level(late)
    if max(a, b) < DISAGREE or max(a, b) < 3.0 * min(a, b):
        return
    what = "later" if b > a else "earlier"
    remedy = (
        "compare the engines' positions: rope scaling, the attention window, and the maximum length"
        if b > a
        else "compare the engines' prompts: a cached prefix of other weights, or another chat template"
    )
    yield Finding(
        f"log-probs of rollout and trainer differ by {b:.3f} a token in the later half of the samples, and by {a:.3f} "
        f"in the earlier half: the {what} half is wrong",
        evidence=(seen.of_steps((late[0][0], late[-1][0]), abs_delta_early=a, abs_delta_late=b),),
        remedy=remedy,
        settings=("rollout.backend", "trainer.backend"),
    )


@rule("The policy drifts far from its reference.")
def kl_drift(seen: Observations) -> Iterator[Finding]:
    """Find a KL that rises above half a nat a token."""
    series = seen.series("kl")
    compared = ends(series)
    if compared is None or len(series) < STEPS:
        return
    trend = rank_correlation([float(step) for step, _ in series], values(series))
    if compared[1] > DRIFT and trend > 0.7:  # noqa: PLR2004
        yield Finding(
            f"the KL to the reference rose from {compared[0]:.3g} to {compared[1]:.3g} nats a token",
            evidence=(seen.of_steps((series[0][0], series[-1][0]), first=compared[0], last=compared[1]),),
            remedy="raise algorithm.kl.coefficient, set algorithm.kl.target, or lower trainer.learning_rate",
            settings=("algorithm.kl.coefficient", "algorithm.kl.target", "trainer.learning_rate"),
        )


@rule("Few samples carry the whole step: the importance ratios are far from 1.")
def ratio_drift(seen: Observations) -> Iterator[Finding]:
    """Look at the effective sample size of the last steps."""
    last = [(step, _effective(f)) for step, f in sorted(seen.steps.items())[-10:] if f.get("ratio_squared")]
    if len(last) >= STEPS and level(last) < LOW_SHARE:
        yield Finding(
            f"the effective sample size is {level(last):.0%} of the tokens: ratios of trainer and rollout are far "
            "from 1",
            evidence=(seen.of_steps((last[0][0], last[-1][0]), effective=level(last)),),
            remedy="lower staleness.max or the learning rate, or bound the ratios by algorithm.correction",
            settings=("staleness.max", "algorithm.correction.kind", "trainer.learning_rate"),
        )


def _effective(figures: Mapping[str, float]) -> float:
    return figures["ratio"] ** 2 / figures["ratio_squared"]


@rule("A large part of the tokens is clipped and trains nothing.")
def many_clipped(seen: Observations) -> Iterator[Finding]:
    """Look at the share of clipped tokens of the last steps."""
    last = seen.series("clipped")[-10:]
    if len(last) >= STEPS and level(last) > LOW_SHARE:
        yield Finding(
            f"{level(last):.0%} of the tokens are clipped",
            evidence=(seen.of_steps((last[0][0], last[-1][0]), clipped=level(last)),),
            remedy="lower trainer.learning_rate, staleness.max or the updates a batch, or widen the clip bounds",
            settings=("trainer.learning_rate", "staleness.max", "trainer.epochs"),
        )


@rule("A large part of the sequences is rejected as off-policy.")
def many_rejected(seen: Observations) -> Iterator[Finding]:
    """Compare rejected sequences with the samples of a step."""
    last = seen.series("rejected")[-10:]
    samples = int(seen.setting("trainer.prompts_per_step", 1)) * int(seen.setting("rollout.group_size", 1))
    if len(last) >= STEPS and level(last) > LOW_SHARE * samples:
        yield Finding(
            f"{level(last):.0f} of {samples} sequences of a step are rejected as too far from the policy",
            evidence=(seen.of_steps((last[0][0], last[-1][0]), rejected=level(last)),),
            remedy="lower staleness.max, widen the bounds of algorithm.reject, or find why the engines disagree",
            settings=("staleness.max", "algorithm.reject.low", "algorithm.reject.high"),
        )


@rule("The trainer's router chooses other experts than the rollout's.", "arXiv 2510.11370")
def rerouted_experts(seen: Observations) -> Iterator[Finding]:
    """Look at the share of choices of experts that differ."""
    last = seen.series("rerouted")[-10:]
    if len(last) >= FIRST and level(last) > LOW_SHARE:
        yield Finding(
            f"{level(last):.0%} of the recorded choices of experts differ from those of the trainer's router",
            is_problem=False,
            evidence=(seen.of_steps((last[0][0], last[-1][0]), rerouted=level(last)),),
            remedy="keep trainer.router_replay on; lower staleness.max",
            settings=("trainer.router_replay", "staleness.max"),
        )


@rule("The student does not come closer to its teacher.")
def teacher_not_followed(seen: Observations) -> Iterator[Finding]:
    """Compare the distance from the teacher at both ends of the run."""
    series = seen.series("teacher_kl")
    compared = ends(series)
    if compared is None or len(series) < 20 or compared[1] < compared[0] or compared[1] < DISAGREE:  # noqa: PLR2004
        return
    yield Finding(
        f"the distance from the teacher was {compared[0]:.3g} nats a token and is {compared[1]:.3g}",
        evidence=(seen.of_steps((series[0][0], series[-1][0]), first=compared[0], last=compared[1]),),
        remedy="check that teacher and student share the tokenizer and the chat template, and the learning rate",
        settings=("algorithm.distil.coefficient", "trainer.learning_rate"),
    )
