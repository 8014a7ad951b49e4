"""Rules about time: who waits for whom, and which setting moves it."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence

from relax_actors.messages import DropReason
from relax_actors.monitoring.diagnosis.observations import Observations, Reading
from relax_actors.monitoring.diagnosis.rule import rule
from relax_actors.monitoring.diagnosis.statistics import ends, level
from relax_actors.monitoring.finding import Finding

STEPS, SECONDS = 8, 10
"""Steps and readings (about one a second) that a rule looks at, at least."""
STARVED, FED = 0.9, 0.1
"""Share of the time of steps in which the trainer waited for rows: much, and next to nothing."""
BUSY, IDLE = 0.9, 0.4
"""Share of the time in which an actor handled rows."""
SLOWER, SLOWER_SECONDS, WINDOWS = 1.1, 0.005, 3
"""A straggler takes this much more than the median of its peers, and this many seconds more, in so many windows."""
MAX_REASONS = 5
WHY_DROPPED: dict[str, tuple[str, ...]] = {
    DropReason.TOO_OLD: ("raise staleness.max, or use fewer rollout actors", "staleness.max", "rollout.replicas"),
    DropReason.NO_SIGNAL: (
        "all samples of these rows got the same reward: use tasks that the model solves sometimes, or larger groups",
        "rollout.group_size",
        "data.path",
    ),
    DropReason.TRUNCATED: ("no sample has a trained token: raise rollout.max_tokens", "rollout.max_tokens"),
    DropReason.LOST_SEGMENT: ("files of the store were lost: check its disk", "store.path"),
}
"""Remedy and settings by the reason of most dropped rows."""
BETWEEN = (
    "reward",
    "advantages",
    "reference",
    "actor_fwd",
    "squares",
    "teacher",
    "reward_model",
    "judge",
    "environment",
)
"""Roles between generation and training."""


def starved_share(seen: Observations) -> float | None:
    """Return the share of last steps in which the trainer waited; None with few steps."""
    last = sorted(seen.steps)[2:][-50:]  # the first steps wait for engines that load
    known = [seen.steps[step] for step in last if "starved_seconds" in seen.steps[step]]
    total = sum(figures.get("waited_seconds", 0.0) + figures.get("train_seconds", 0.0) for figures in known)
    if len(known) < STEPS or total <= 0:
        return None
    return sum(figures["starved_seconds"] for figures in known) / total


def busy_share(seen: Observations, role: str) -> float | None:
    """Return the mean share of time in which a role's actors worked; None if unknown."""
    of_role = [readings for name, readings in seen.actors.items() if name.rpartition(".")[0] == role]
    shares = [reading.figures.get("busy", 0.0) for readings in of_role for reading in list(readings)[3:][-60:]]
    return statistics.fmean(shares) if len(shares) >= SECONDS else None


def _last_steps(seen: Observations) -> list[int]:
    return sorted(seen.steps)[-50:]


@rule("The trainer waits for rows while all rollout actors are busy.")
def starved_trainer(seen: Observations) -> Iterator[Finding]:
    """Compare the trainer's waiting with the work of the rollout actors."""
    share, busy = starved_share(seen), busy_share(seen, "rollout")
    if share is not None and busy is not None and share > STARVED and busy > BUSY:
        yield Finding(
            f"the trainer waits for rows {share:.0%} of the time, and the rollout actors are busy {busy:.0%} of it",
            is_problem=False,
            evidence=(seen.of_steps(_last_steps(seen), starved=share), seen.of_actor("rollout.*", busy=busy)),
            remedy=f"generation limits the run: add actors (`relax scale {seen.run} rollout=N`) or larger batches",
            settings=("rollout.replicas", "rollout.max_concurrent_prompts"),
        )


@rule("Rollout actors are idle while the trainer has all the rows it needs.")
def idle_rollouts(seen: Observations) -> Iterator[Finding]:
    """Find rollout actors that wait for the trainer."""
    share, busy = starved_share(seen), busy_share(seen, "rollout")
    if share is None or busy is None or share > FED or busy > IDLE:
        return
    lead = int(seen.setting("staleness.max", 0))
    yield Finding(
        f"the rollout actors are busy {busy:.0%} of the time, and the trainer waits for rows {share:.0%} of it",
        is_problem=False,
        evidence=(seen.of_actor("rollout.*", busy=busy), seen.of_steps(_last_steps(seen), starved=share)),
        remedy="training limits the run: use fewer rollout actors, or give the trainer more devices"
        + ("; with staleness.max = 0 generation and training take turns: 1 lets them overlap" if lead == 0 else ""),
        settings=("staleness.max", "rollout.replicas", "trainer.torch.ranks"),
    )


@rule("Rows wait for one role between generation and training.")
def slow_role(seen: Observations) -> Iterator[Finding]:
    """Find a role that is busy while the trainer waits and the rollout does not limit the run."""
    share, rollout = starved_share(seen), busy_share(seen, "rollout")
    if share is None or rollout is None or share < STARVED or rollout > BUSY:
        return
    busy = {role: part for role in BETWEEN if (part := busy_share(seen, role)) is not None}
    role = max(busy, key=busy.__getitem__, default="")
    if role and busy[role] > BUSY:
        section = role if role in ("reward", "advantages", "environment") else f"roles.{role}"
        yield Finding(
            f"role {role} is busy {busy[role]:.0%} of the time, and the trainer waits for rows {share:.0%} of it",
            evidence=(seen.of_actor(f"{role}.*", busy=busy[role]), seen.of_steps(_last_steps(seen), starved=share)),
            remedy=f"role {role} limits the run: `relax scale {seen.run} {role}=N`, or make it faster",
            settings=(f"{section}.replicas",),
        )


@rule("A rollout actor samples with weights older than staleness.max allows.")
def weights_lag(seen: Observations) -> Iterator[Finding]:
    """Compare the versions of the rollout actors with the trainer's over the last readings."""
    trainer = seen.actors.get("trainer.0")
    if not trainer:
        return
    allowed = int(seen.setting("staleness.max", 0)) + 2
    for name, readings in seen.actors.items():
        if not name.startswith("rollout.") or len(readings) < SECONDS:
            continue
        lags = [_version_at(trainer, r.time) - r.figures.get("version", -1.0) for r in list(readings)[-SECONDS:]]
        if min(lags) > allowed and _is_working(readings):
            yield Finding(
                f"{name} uses weights {min(lags):.0f} versions old, and rows may be {allowed - 2} old at most",
                evidence=(seen.of_actor(name, lag=min(lags)), seen.of_actor("trainer.0")),
                remedy=f"read logs/{name}.log: it cannot read or swap new weights; check the disk of store.path",
                settings=("staleness.max", "weights.transport"),
            )


def _version_at(trainer: Sequence[Reading], time: float) -> float:
    return max((r.figures.get("version", 0.0) for r in trainer if r.time <= time), default=0.0)


def _is_working(readings: Sequence[Reading]) -> bool:
    last = list(readings)[-SECONDS:]
    return last[-1].figures.get("rows", 0.0) > last[0].figures.get("rows", 0.0)


@rule("One actor takes longer for a token than its peers.")
def stragglers(seen: Observations) -> Iterator[Finding]:
    """Compare the seconds a token of rollout actors in the last windows of equal time."""
    actors = {name: list(readings) for name, readings in seen.generated.items() if len(readings) >= WINDOWS}
    if len(actors) < 3:  # noqa: PLR2004 the median of two is between them
        return
    begin = max(readings[0].time for readings in actors.values())
    end = min(readings[-1].time for readings in actors.values())
    slow: dict[str, list[float]] = {}
    for k in range(WINDOWS):
        low, high = (begin + (end - begin) * part / WINDOWS for part in (k, k + 1))
        rates = {name: rate for name, readings in actors.items() if (rate := _per_token(readings, low, high))}
        if len(rates) < 3:  # noqa: PLR2004
            return
        middle = statistics.median(rates.values())
        for name, rate in rates.items():
            if rate > SLOWER * middle and rate - middle > SLOWER_SECONDS / 10:
                slow.setdefault(name, []).append(rate / middle)
    for name, factors in slow.items():
        if len(factors) == WINDOWS:
            factor = statistics.median(factors)
            yield Finding(
                f"{name} takes {factor:.2f} times as long for a token as the median of its {len(actors) - 1} peers",
                evidence=(seen.of_actor(name, factor=factor), seen.of_actor("rollout.*")),
                remedy="compare its machine with the others': other load, a slower or throttled device, less memory",
            )


def _per_token(readings: Sequence[Reading], low: float, high: float) -> float:
    """Return the seconds a token in a window; 0 without tokens."""
    inside = [reading.figures for reading in readings if low <= reading.time <= high]
    tokens = sum(figures.get("tokens", 0.0) for figures in inside)
    return sum(figures.get("seconds", 0.0) for figures in inside) / tokens if tokens else 0.0


@rule("Steps take longer and longer for the same number of tokens.")
def slower_steps(seen: Observations) -> Iterator[Finding]:
    """Compare the training seconds a token at the beginning and at the end."""
    known = [
        (step, figures["train_seconds"] / figures["tokens"])
        for step, figures in sorted(seen.steps.items())[2:]
        if figures.get("tokens") and figures.get("train_seconds")
    ]
    compared = ends(known, least=10)
    if compared is not None and compared[1] > 2.0 * compared[0] and level(known) > 2.0 * compared[0]:
        yield Finding(
            f"a step takes {compared[1] / compared[0]:.1f} times as long for a token as in the first steps",
            is_problem=False,
            evidence=(seen.of_steps((known[0][0], known[-1][0]), first=compared[0], last=compared[1]),),
            remedy="look for memory pressure or other load on the trainer's machine; the timeline shows the steps",
        )


@rule("Most of the rows are dropped untrained.")
def wasted_rows(seen: Observations) -> Iterator[Finding]:
    """Compare dropped rows with admitted ones."""
    readings = seen.actors.get("prompts.0")
    figures = readings[-1].figures if readings else {}
    admitted, dropped = figures.get("admitted", 0.0), figures.get("dropped", 0.0)
    if admitted < 32 or dropped < 0.5 * admitted:  # noqa: PLR2004
        return
    reasons: Counter[str] = Counter()
    for event in seen.events:
        if event.kind == "row_dropped":
            reasons[event.text or "unknown"] += event.count
    main = reasons.most_common(1)[0][0] if reasons else ""
    listed = f"`relax tail 'relax.{seen.run}.event.*.*.row_dropped' --history` lists them with their reasons"
    remedy, *settings = WHY_DROPPED.get(main, (listed,))
    # Dynamic sampling drops rows by design; it costs their generation.
    is_wanted = main == DropReason.NO_SIGNAL and bool(seen.setting("algorithm.shaping.filter_zero_variance"))
    counts = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common(MAX_REASONS))
    by_reason = f"; seen by reason: {counts}" if counts else ""
    yield Finding(
        f"{dropped:.0f} of {admitted:.0f} rows were dropped untrained{by_reason}",
        is_problem=not is_wanted,
        evidence=(seen.of_actor("prompts.0", admitted=admitted, dropped=dropped), seen.of_events("row_dropped")),
        remedy=remedy,
        settings=tuple(settings),
    )
