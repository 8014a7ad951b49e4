"""Rules about actors, rows that fail, and messages that should not be there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from relax_actors.counted import counted
from relax_actors.monitoring.diagnosis.observations import Observations
from relax_actors.monitoring.diagnosis.rule import rule
from relax_actors.monitoring.finding import Finding

LOOP_CRASHES, LOOP_SECONDS = 3, 600.0
MANY_SHARE, MANY = 0.05, 4
"""Share of the trained rows, and number, from which failing rows are many."""
SKEW_SECONDS, SKEW_MESSAGES = 5.0, 10
"""Least difference of clocks, and messages of which the least delayed one has it: a busy broker delays single ones."""


@rule("An actor crashes again and again with the same error.")
def restart_loop(seen: Observations) -> Iterator[Finding]:
    """Count an actor's equal crashes in ten minutes; kills from outside do not count."""
    crashes: dict[tuple[str, str], list[float]] = {}
    for event in seen.events:
        if event.kind == "crashed" and not event.external:
            crashes.setdefault((event.sender, event.text), []).append(event.time)
    for (sender, text), times in crashes.items():
        recent = [time for time in times if time >= seen.newest - LOOP_SECONDS]
        if len(recent) >= LOOP_CRASHES:
            yield Finding(
                f"{sender} crashed {len(recent)} times in {LOOP_SECONDS / 60:.0f} minutes, with: "
                f"{text or 'no error text'}",
                evidence=(seen.of_events("crashed", sender, crashes=len(recent)),),
                remedy=f"read logs/{sender}.log in the run's folder; an error of your own function repeats with its "
                "row",
                settings=("supervision.intensity", "supervision.max_failures"),
            )


@rule("More than one row in twenty is quarantined.")
def quarantine_grows(seen: Observations) -> Iterator[Finding]:
    """Compare quarantined rows with trained ones."""
    yield from _many(seen, "row_quarantined", "were quarantined", is_problem=True)


@rule("More than one row in twenty fails before it succeeds.")
def rows_retried(seen: Observations) -> Iterator[Finding]:
    """Compare failures that were tried again with trained rows."""
    yield from _many(seen, "row_failed", "failed and were tried again", is_problem=False)


@rule("Agents or environments fail, so that samples end without a true reward.")
def failing_episodes(seen: Observations) -> Iterator[Finding]:
    """Compare failed agents and environments with trained rows."""
    for kind, what in (
        ("agent_failed", "agents failed"),
        ("agent_without_reward", "agents ended without a reward, which counts as 0"),
        ("environment_failed", "environments failed"),
    ):
        yield from _many(seen, kind, what, is_problem=True)


def _many(seen: Observations, kind: str, what: str, *, is_problem: bool) -> Iterator[Finding]:
    events = [event for event in seen.events if event.kind == kind]
    count = sum(event.count for event in events)
    rows = max(1, len(seen.steps) * int(seen.setting("trainer.prompts_per_step", 1)))
    if count < MANY or count < MANY_SHARE * rows:
        return
    error = Counter(event.text for event in events if event.text).most_common(1)
    role = Counter(event.role for event in events).most_common(1)[0][0]
    yield Finding(
        f"{count} rows or samples {what} in role {role}, beside {rows} that were trained"
        + (f"; most often: {error[0][0]}" if error else ""),
        is_problem=is_problem,
        evidence=(seen.of_events(kind, count=count),),
        remedy=f"`relax tail 'relax.{seen.run}.event.*.*.{kind}' --history` lists them; correct the data or the "
        "function",
        settings=("supervision.max_failures",),
    )


@rule("A restarted trainer computed other weights than before.")
def replay_differs(seen: Observations) -> Iterator[Finding]:
    """Find the event `replay_diverged`."""
    if count := seen.counted("replay_diverged"):
        yield Finding(
            f"replayed steps gave other weights than before the restart ({counted(count, 'time')})",
            evidence=(seen.of_events("replay_diverged", count=count),),
            remedy="set run.deterministic = true, and use the same device, kernels and versions for a restarted "
            "trainer",
            settings=("run.deterministic",),
        )


@rule("Files of weights or rows are damaged.")
def damaged_files(seen: Observations) -> Iterator[Finding]:
    """Find weights that do not match their fingerprint, and rebuilt or lost segments."""
    kinds = ("weights_corrupt", "media_rebuilt")
    count = seen.counted(*kinds) + sum(e.kind == "row_dropped" and "segment" in e.text for e in seen.events)
    if count > 1:
        yield Finding(
            f"{count} files of the store were damaged or lost",
            evidence=(seen.of_events("*", count=count),),
            remedy="check the disk or network file system of store.path; nothing else may write or clean that folder",
            settings=("store.path",),
        )


@rule("Clients write messages that do not belong to the run.")
def foreign_messages(seen: Observations) -> Iterator[Finding]:
    """Count malformed and stray cells."""
    kinds = ("malformed_cell", "malformed_subject", "malformed_request", "stray_cell")
    if (count := seen.counted(*kinds)) >= MANY:
        yield Finding(
            f"{count} malformed or stray messages were ignored or removed",
            is_problem=False,
            evidence=(seen.of_events("malformed_cell", count=count),),
            remedy=f"find their author with `relax tail 'relax.{seen.run}.event.>' --history`; rotate its keys",
        )


@rule("The clocks of machines differ.")
def clocks_differ(seen: Observations) -> Iterator[Finding]:
    """Compare the times of messages with those of the broker."""
    known = {name: seconds for name, seconds in seen.skew.items() if seen.heard[name] >= SKEW_MESSAGES}
    apart = {name: seconds for name, seconds in known.items() if abs(seconds) > SKEW_SECONDS}
    if apart:
        name, seconds = max(apart.items(), key=lambda entry: abs(entry[1]))
        yield Finding(
            f"the clock of {name} is {abs(seconds):.1f} s {'behind' if seconds > 0 else 'ahead of'} the broker's",
            is_problem=False,
            evidence=(seen.of_actor(name, seconds=seconds),),
            remedy="synchronise the clocks of the machines (NTP): times in events and plots mislead otherwise",
        )
