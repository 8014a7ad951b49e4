"""Rules about held-out prompts beside training."""

from __future__ import annotations

from collections.abc import Iterator

from relax_actors.monitoring.diagnosis.observations import Observations
from relax_actors.monitoring.diagnosis.rule import rule
from relax_actors.monitoring.diagnosis.rules.rewards import is_sampled
from relax_actors.monitoring.diagnosis.statistics import ends, values
from relax_actors.monitoring.finding import Finding

EVALUATIONS, RISE = 3, 0.1


@rule("The training reward rises and the held-out reward does not: a forged or memorised reward.", "arXiv 2210.10760")
def reward_without_evaluation(seen: Observations) -> Iterator[Finding]:
    """Compare the rise of the training reward with that of the evaluations."""
    held_out = sorted(seen.evaluations.items())
    trained = ends(seen.series("reward"))
    if not is_sampled(seen) or trained is None or len(held_out) < EVALUATIONS:
        return
    rise, held_out_rise = trained[1] - trained[0], held_out[-1][1] - held_out[0][1]
    if rise > RISE and held_out_rise < 0.1 * rise:
        yield Finding(
            f"the training reward rose by {rise:.2f}, and that of held-out prompts by {held_out_rise:.2f}",
            evidence=(seen.of_events("evaluated", "evaluator.0", rise=rise, held_out_rise=held_out_rise),),
            remedy="read samples with a high reward: it may be forged or memorised; grade by what the policy cannot "
            "write, and check that both rewards measure the same",
            settings=("reward.function", "eval.data.path", "data.path"),
        )


@rule("Held-out prompts were answered better by an earlier version.")
def evaluation_fell(seen: Observations) -> Iterator[Finding]:
    """Compare the last two evaluations with the best one."""
    held_out = sorted(seen.evaluations.items())
    if len(held_out) < EVALUATIONS + 1:
        return
    best_version, best = max(held_out, key=lambda entry: entry[1])
    last = max(values(held_out[-2:]))
    if last < best - RISE * max(1.0, abs(best)):
        yield Finding(
            f"version {best_version} scored {best:.3g} on held-out prompts, and the last two at most {last:.3g}",
            is_problem=False,
            evidence=(seen.of_events("evaluated", "evaluator.0", best=best, last=last),),
            remedy=f"use version {best_version}; lower trainer.learning_rate, or stop earlier",
            settings=("trainer.learning_rate", "run.steps"),
        )
