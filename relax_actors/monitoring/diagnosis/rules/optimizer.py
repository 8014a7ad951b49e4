"""Rules about the optimizer's updates, entropies and the critic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

from relax_actors.monitoring.diagnosis.observations import Observations
from relax_actors.monitoring.diagnosis.rule import rule
from relax_actors.monitoring.diagnosis.rules.rewards import is_sampled, is_saturated
from relax_actors.monitoring.diagnosis.statistics import ends, level, partial_correlation, values
from relax_actors.monitoring.finding import Finding

STEPS = 6
SAME = 3
"""Equal weight versions in sequence."""


@rule("The weights do not change: updates are lost in rounding, or the learning rate is 0.", "arXiv 2010.06192")
def weights_unchanged(seen: Observations) -> Iterator[Finding]:
    """Find successive versions with one fingerprint after the warm-up of a critic."""
    if seen.setting("simulate"):
        return
    begin = int(seen.setting("critic.warmup_steps", 0))
    known = sorted(version for version in seen.fingerprints if version >= begin)
    same = 0
    for before, version in pairwise(known):
        is_same = seen.fingerprints[before] == seen.fingerprints[version]
        is_expected = before in seen.steps and _has_signal(seen.steps[before])
        same = same + 1 if is_same and is_expected else 0
        if same >= SAME:
            yield Finding(
                f"weight versions {version - same} to {version} are equal: {same} steps changed nothing",
                evidence=(seen.of_steps((version - same, version - 1)),),
                remedy="small updates vanish in half precision: keep float32 master weights, or raise the learning "
                "rate; look whether grad_norm is 0",
                settings=("trainer.precision", "trainer.learning_rate"),
            )
            return


@rule("The gradient is 0 in every step.")
def no_gradient(seen: Observations) -> Iterator[Finding]:
    """Find steps without a gradient that are not explained by groups without signal."""
    last = seen.series("grad_norm", of={n: step for n, step in seen.steps.items() if _has_signal(step)})[-10:]
    if not is_saturated(seen) and len(last) >= STEPS and max(values(last)) == 0.0:
        yield Finding(
            f"the gradient is 0 in the last {len(last)} steps that have a signal: nothing is trained",
            evidence=(seen.of_steps((last[0][0], last[-1][0]), grad_norm=0.0),),
            remedy="look at clipped and rejected; a custom loss must not detach its log-probs",
            settings=("reward.function", "algorithm.surrogate"),
        )


def _has_signal(figures: Mapping[str, float]) -> bool:
    """Whether a row of the step has different advantages, so that a gradient is expected."""
    return figures.get("no_signal", 0.0) < 1.0


@rule("Every gradient is clipped to a small part of itself.")
def gradient_clipped(seen: Observations) -> Iterator[Finding]:
    """Compare the norms of the last steps with their bound."""
    last, bound = seen.series("grad_norm")[-20:], float(seen.setting("trainer.max_grad_norm", 0.0))
    if bound > 0 and len(last) >= 10 and min(values(last)) > 10.0 * bound:  # noqa: PLR2004
        yield Finding(
            f"every gradient is more than ten times as long as trainer.max_grad_norm = {bound:g}",
            is_problem=False,
            evidence=(seen.of_steps((last[0][0], last[-1][0]), grad_norm=level(last)),),
            remedy="only directions are left of the gradients: raise the bound, or check algorithm.aggregate, which "
            "scales the loss",
            settings=("trainer.max_grad_norm", "algorithm.aggregate"),
        )


@rule("Single gradients are many times as long as usual.")
def gradient_spikes(seen: Observations) -> Iterator[Finding]:
    """Count the steps of the last hundred whose gradient is more than twenty times the median."""
    last = seen.series("grad_norm")[-100:]
    usual = level(last)
    spikes = [step for step, norm in last if norm > 20.0 * usual]
    if len(last) >= 10 and usual > 0 and len(spikes) >= 2:  # noqa: PLR2004
        yield Finding(
            f"the gradient of {len(spikes)} of the last {len(last)} steps is over 20 times the usual {usual:.3g}",
            is_problem=False,
            evidence=(seen.of_steps(spikes, usual=usual),),
            remedy="look at the samples of these steps; bound ratios (algorithm.correction) and gradients",
            settings=("trainer.max_grad_norm", "algorithm.correction.kind"),
        )


@rule("The entropy is gone before the task is learned.", "arXiv 2505.22617")
def entropy_collapse(seen: Observations) -> Iterator[Finding]:
    """Find an entropy that falls to a tenth while the reward is not near its top."""
    series, reward = seen.series("entropy_proxy"), seen.series("reward")
    compared = ends(series)
    if not is_sampled(seen) or compared is None or len(series) < STEPS or not reward:
        return
    first, last = compared
    learned = level(reward[-10:]) >= 0.8 * max(1.0, *values(reward))
    if first > 0.1 and last < 0.1 * first and not learned:  # noqa: PLR2004
        yield Finding(
            f"the entropy fell from {first:.3g} to {last:.3g} nats a token while the reward is "
            f"{level(reward[-10:]):.3g}",
            evidence=(seen.of_steps((series[0][0], series[-1][0]), first=first, last=last),),
            remedy="set algorithm.entropy.target, raise algorithm.clip_high, or lower trainer.learning_rate",
            settings=("algorithm.entropy.target", "algorithm.clip_high", "trainer.learning_rate"),
        )


@rule("The entropy grows and the reward falls: the policy dissolves.")
def entropy_explosion(seen: Observations) -> Iterator[Finding]:
    """Find an entropy that doubles while the reward falls."""
    compared, reward = ends(seen.series("entropy_proxy")), ends(seen.series("reward"))
    if not is_sampled(seen) or compared is None or reward is None or len(seen.steps) < 10:  # noqa: PLR2004
        return
    if compared[1] > 2.0 * compared[0] + 0.5 and reward[1] < reward[0] - 0.05 * max(1.0, abs(reward[0])):
        yield Finding(
            f"the entropy rose from {compared[0]:.3g} to {compared[1]:.3g} nats a token while the reward fell",
            evidence=(seen.of_steps(seen.steps, first=compared[0], last=compared[1]),),
            remedy="lower the entropy bonus and trainer.learning_rate, or add a KL to the reference",
            settings=("algorithm.entropy.coefficient", "trainer.learning_rate", "algorithm.kl.coefficient"),
        )


@rule("Updates are skipped since their gradients are not finite.")
def skipped_updates(seen: Observations) -> Iterator[Finding]:
    """Count skipped updates of the last steps."""
    last = seen.series("skipped_updates")[-20:]
    if len(last) >= STEPS and sum(values(last)) > 0.2 * len(last):
        yield Finding(
            f"{sum(values(last)):.0f} updates of the last {len(last)} steps were skipped: their gradients overflow",
            evidence=(seen.of_steps((last[0][0], last[-1][0]), skipped=sum(values(last))),),
            remedy='set trainer.precision = "bfloat16", whose range is that of float32',
            settings=("trainer.precision",),
        )


@rule("The gradient depends on the number of micro-batches.", "huggingface/transformers#35203")
def loss_by_micro_batches(seen: Observations) -> Iterator[Finding]:
    """Correlate gradients with micro-batches, without what the number of tokens explains."""
    known = [f for _, f in sorted(seen.steps.items()) if {"micro_batches", "grad_norm", "tokens"} <= f.keys()][-200:]
    counts = [figures["micro_batches"] for figures in known]
    if len(known) < 10 or len(set(counts)) < 3:  # noqa: PLR2004
        return
    norms, tokens = ([figures[name] for figures in known] for name in ("grad_norm", "tokens"))
    correlation = partial_correlation(norms, counts, tokens)
    if correlation > 0.9:  # noqa: PLR2004
        yield Finding(
            f"the norm of the gradient follows the number of micro-batches (partial correlation {correlation:.2f} over "
            f"{len(known)} steps)",
            evidence=(seen.of_steps(sorted(seen.steps)[-200:], correlation=correlation),),
            remedy="a loss must be a sum over tokens that is divided once by a count of the whole step; check your "
            "own function with `relax check`",
            settings=("algorithm.surrogate", "trainer.max_tokens_per_microbatch"),
        )


@rule("The critic explains none of the returns.")
def blind_critic(seen: Observations) -> Iterator[Finding]:
    """Look at the explained variance of the critic's last steps."""
    series = seen.series("explained_variance", of=seen.critic)
    last = series[-10:]
    if len(series) >= 20 and level(last) < 0.0:  # noqa: PLR2004
        yield Finding(
            f"the critic's values explain less of the returns than their mean would ({level(last):.2f})",
            evidence=(seen.of_steps((last[0][0], last[-1][0]), role="critic", explained_variance=level(last)),),
            remedy="raise critic.learning_rate or critic.warmup_steps, or use an advantage without a critic",
            settings=("critic.learning_rate", "critic.warmup_steps"),
        )
