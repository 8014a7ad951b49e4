"""Rules about rewards: none, always the same, too good to be true."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from relax_actors.monitoring.diagnosis.observations import Observations
from relax_actors.monitoring.diagnosis.rule import rule
from relax_actors.monitoring.diagnosis.statistics import ends, level, rank_correlation, values
from relax_actors.monitoring.finding import Finding

STEPS, MANY_STEPS = 6, 20
NO_SIGNAL = 0.8
SATURATED = 0.95
"""Share of the best mean reward so far from which the reward is at its top."""
CHANGE = 0.1


def is_sampled(seen: Observations) -> bool:
    """Whether rows are sampled and their rewards matter."""
    sampled: bool = seen.setting("algorithm.rows", "sampled") == "sampled"
    distilled: bool = seen.setting("algorithm.distil.place", "none") != "none"
    return sampled and not distilled


@rule("The reward is the same number in every step.")
def flat_reward(seen: Observations) -> Iterator[Finding]:
    """Find a mean reward that never changes."""
    series = seen.series("reward")
    if not is_sampled(seen) or len(series) < STEPS or max(values(series)) - min(values(series)) > 1e-6:  # noqa: PLR2004
        return
    if is_saturated(seen) or (_has_players(seen) and level(seen.series("no_signal")) < NO_SIGNAL):
        return
    yield Finding(
        f"the mean reward is {series[0][1]:g} in all {len(series)} steps",
        evidence=(seen.of_steps((series[0][0], series[-1][0]), reward=series[0][1]),),
        remedy=f"read samples (`relax samples {seen.run}`), and check that reward.function parses what the model "
        "writes",
        settings=("reward.function", "rollout.max_tokens"),
    )


@rule("Most groups have no signal: all samples of a prompt get the same reward.")
def groups_without_signal(seen: Observations) -> Iterator[Finding]:
    """Find steps whose advantages are all 0, while the reward is not at its top."""
    last = seen.series("no_signal")[-20:]
    if not is_sampled(seen) or len(last) < STEPS or level(last) < NO_SIGNAL or is_saturated(seen):
        return
    reward = level(seen.series("reward")[-20:])
    yield Finding(
        f"{level(last):.0%} of the groups have no signal: all of their samples get the same reward, {reward:.3g} on "
        "average",
        evidence=(seen.of_steps((last[0][0], last[-1][0]), no_signal=level(last), reward=reward),),
        remedy="use easier or graded tasks, larger groups, or a higher temperature",
        settings=("rollout.group_size", "rollout.temperature", "data.path"),
    )


@rule("The reward is at its top, and nothing is left to learn.")
def saturated_reward(seen: Observations) -> Iterator[Finding]:
    """Find groups without signal at the best reward of the run."""
    last = seen.series("no_signal")[-20:]
    if is_sampled(seen) and len(last) >= STEPS and level(last) >= NO_SIGNAL and is_saturated(seen):
        reward = level(seen.series("reward")[-20:])
        yield Finding(
            f"the reward is saturated at {reward:.3g}: {level(last):.0%} of the groups have no signal",
            is_problem=False,
            evidence=(seen.of_steps((last[0][0], last[-1][0]), no_signal=level(last), reward=reward),),
            remedy="the run has learned its tasks; add harder ones, or stop it",
            settings=("data.path", "run.steps"),
        )


def _has_players(seen: Observations) -> bool:
    """Whether samples have players, whose rewards may add up to the same sum in every row."""
    return any(seen.setting(f"{section}.players") for section in ("environment", "agent"))


def is_saturated(seen: Observations) -> bool:
    """Whether the reward of the last steps is at its top."""
    series = seen.series("reward")
    if not series:
        return False
    low, top = min(values(series)), max(values(series))
    # A reward that was never higher and never lower is flat; at 0 it is no success.
    return top > 0 and level(series[-20:]) >= SATURATED * top and (top > low or top >= 1.0)


@rule("The reward rose and fell again.")
def reward_collapse(seen: Observations) -> Iterator[Finding]:
    """Compare the best window of steps with the last one."""
    series = seen.series("reward")
    if not is_sampled(seen) or len(series) < MANY_STEPS:
        return
    size = max(5, len(series) // 10)
    levels = [(series[i][0], level(series[i : i + size])) for i in range(len(series) - size + 1)]
    at, best = max(levels, key=lambda entry: entry[1])
    first, last = levels[0][1], levels[-1][1]
    rise, noise = best - first, max(abs(b - a) for (_, a), (_, b) in pairwise(series))
    if best - last > max(0.5 * rise, CHANGE * abs(best), 2.0 * noise) and rise > noise / 2:
        yield Finding(
            f"the reward fell from {best:.3g} around step {at} to {last:.3g}",
            evidence=(seen.of_steps((at, series[-1][0]), best=best, last=last),),
            remedy="compare clipped, k3, kl and grad_norm around that step; lower trainer.learning_rate, or raise "
            "the KL",
            settings=("trainer.learning_rate", "algorithm.kl.coefficient"),
        )


@rule("A component of the reward is 0 in every step.")
def dead_component(seen: Observations) -> Iterator[Finding]:
    """Find a component that no sample ever gets, while the reward varies."""
    reward = seen.series("reward")
    if len(reward) < STEPS or max(values(reward)) == min(values(reward)):
        return
    names = {name for figures in seen.steps.values() for name in figures if name.startswith("reward/")}
    for name in sorted(names):
        series = seen.series(name)
        if len(series) >= STEPS and not any(values(series)):
            yield Finding(
                f"component {name.removeprefix('reward/')} of the reward is 0 in all {len(series)} steps",
                is_problem=False,
                evidence=(seen.of_steps((series[0][0], series[-1][0])),),
                remedy="check its function on a sample that should get it; remove it if it cannot be reached yet",
                settings=("reward.function",),
            )


@rule("One component of the reward rises while another one falls.", "arXiv 2209.13085")
def traded_components(seen: Observations) -> Iterator[Finding]:
    """Find a component that is given up for another one."""
    names = sorted({name for figures in seen.steps.values() for name in figures if name.startswith("reward/")})
    changes = {}
    for name in names:
        series = seen.series(name)
        compared = ends(series, least=5)
        if compared is not None and len(series) >= MANY_STEPS:
            trend = rank_correlation([float(step) for step, _ in series], values(series))
            changes[name] = compared[1] - compared[0] if abs(trend) > 0.6 else 0.0  # noqa: PLR2004
    rising = [name for name, change in changes.items() if change > CHANGE]
    for name, change in changes.items():
        if change < -CHANGE and rising:
            up, down = rising[0].removeprefix("reward/"), name.removeprefix("reward/")
            yield Finding(
                f"component {up} of the reward rises by {changes[rising[0]]:.2f} while {down} falls by {-change:.2f}",
                evidence=(seen.of_steps(seen.steps),),
                remedy="the policy trades one for the other: weigh them anew, or multiply them",
                settings=("reward.function",),
            )


@rule("A reward lies far outside of what was seen before: forged, or of another unit.")
def reward_out_of_range(seen: Observations) -> Iterator[Finding]:
    """Find a step whose mean reward is far above all earlier ones."""
    series = seen.series("reward")
    if not is_sampled(seen):
        return
    for k in range(STEPS - 1, len(series)):
        before = values(series[max(0, k - 200) : k])
        low, top = min(before), max(before)
        spread = max(top - low, 0.05 * abs(top), 0.05)
        if series[k][1] > top + 5.0 * spread and series[k][1] > 1.0:
            yield Finding(
                f"the mean reward of step {series[k][0]} is {series[k][1]:.3g}, and was at most {top:.3g} before",
                evidence=(seen.of_steps((series[k][0], series[k][0]), reward=series[k][1], before=top),),
                remedy=f"read its samples (`relax samples {seen.run} --step {series[k][0]}`): an agent may set its "
                "own reward; grade what it did where it cannot write, and bound the reward",
                settings=("reward.function",),
            )
            return


@rule("The reward jumps to its top while samples become much shorter: a shortcut.", "arXiv 2209.13085")
def shortcut(seen: Observations) -> Iterator[Finding]:
    """Find a sudden rise of the reward together with a collapse of the lengths."""
    reward, length = seen.series("reward"), seen.series("length_mean")
    if not is_sampled(seen) or len(reward) < STEPS or len(length) != len(reward):
        return
    for k in range(3, len(reward) - 2):
        before, after = slice(max(0, k - 10), k), slice(k, k + 3)
        rise = level(reward[after]) - level(reward[before])
        short = level(length[after]) < 0.4 * level(length[before]) and level(length[before]) >= 16  # noqa: PLR2004
        if short and rise > 0.3 * max(1.0, abs(level(reward[before]))):
            yield Finding(
                f"at step {reward[k][0]} the reward rises by {rise:.2f} while samples shrink from "
                f"{level(length[before]):.0f} to {level(length[after]):.0f} tokens",
                evidence=(seen.of_steps((reward[k][0], reward[k + 2][0]), rise=rise),),
                remedy=f"read samples of step {reward[k][0]}: the reward may be had without the task",
                settings=("reward.function",),
            )
            return
