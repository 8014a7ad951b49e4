"""Rules about memory and disks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from relax_actors.monitoring.diagnosis.observations import Observations, Reading
from relax_actors.monitoring.diagnosis.rule import rule
from relax_actors.monitoring.diagnosis.statistics import level
from relax_actors.monitoring.finding import Finding

PARTS, LONG_SECONDS = 6, 300.0
"""Parts of the readings that are compared, and how long they must reach back."""
GROWTH, GROWTH_MIB = 0.02, 128.0
"""Growth from each part to the next, as a share, and over all parts."""
HOURS_LEFT = 2.0


@rule("The memory of an actor grows steadily.")
def memory_grows(seen: Observations) -> Iterator[Finding]:
    """Compare the memory of an actor in successive parts of its readings."""
    for name, readings in seen.actors.items():
        levels = _levels(list(readings), "rss_mib")
        if not levels or levels[-1] - levels[0] < GROWTH_MIB:
            continue
        if all(after > (1.0 + GROWTH) * before for before, after in pairwise(levels)):
            seconds = readings[-1].time - readings[0].time
            rate = (levels[-1] - levels[0]) / seconds * 3600
            yield Finding(
                f"the memory of {name} grew from {levels[0]:.0f} to {levels[-1]:.0f} MiB in {seconds / 60:.0f} minutes",
                evidence=(seen.of_actor(name, mib_an_hour=rate),),
                remedy="look for lists or caches that only grow in your own functions; a limit restarts the actor in "
                "time",
                settings=(f"{_section(name.rpartition('.')[0])}.memory_limit_mib",),
            )


@rule("The disk fills up.")
def disk_fills(seen: Observations) -> Iterator[Finding]:
    """Extend the decline of the free space that nodes report."""
    for name, free, hours in _running_out(seen, "disk_free_mib"):
        yield Finding(
            f"the disk of {name} has {free:.0f} MiB free, and is full in {hours:.1f} hours at this rate",
            evidence=(seen.of_actor(name, free_mib=free, hours=hours),),
            remedy="free space, keep fewer checkpoints, or move store.path to a larger disk",
            settings=("store.path", "trainer.keep_checkpoints"),
        )


@rule("The memory of a machine runs out.")
def memory_runs_out(seen: Observations) -> Iterator[Finding]:
    """Extend the decline of the free memory that nodes report: the kernel kills processes when it is used up."""
    for name, free, hours in _running_out(seen, "memory_free_mib"):
        yield Finding(
            f"the machine of {name} has {free:.0f} MiB of memory free, and none in {hours:.1f} hours at this rate",
            evidence=(seen.of_actor(name, free_mib=free, hours=hours),),
            remedy="see in the console which actor grows, and limit it: an actor at its limit is restarted before the "
            "kernel kills another process; or run fewer actors on this machine",
            settings=("rollout.memory_limit_mib", "rollout.replicas"),
        )


def _running_out(seen: Observations, figure: str) -> Iterator[tuple[str, float, float]]:
    """Yield each node on which a figure falls towards 0 within `HOURS_LEFT`: its name, what is left, and the hours."""
    for name, readings in seen.actors.items():
        levels = _levels(list(readings), figure)
        if not levels or any(after >= before for before, after in pairwise(levels)):
            continue
        seconds = (readings[-1].time - readings[0].time) * (PARTS - 1) / PARTS
        hours = levels[-1] / ((levels[0] - levels[-1]) / seconds) / 3600
        if hours < HOURS_LEFT:
            yield name, levels[-1], hours


def _levels(readings: Sequence[Reading], figure: str) -> list[float]:
    """Return the median of a figure in parts of the readings; empty if they are short."""
    known = [(k, reading.figures[figure]) for k, reading in enumerate(readings) if figure in reading.figures]
    if len(known) < 5 * PARTS or readings[-1].time - readings[0].time < LONG_SECONDS:
        return []
    size = len(known) // PARTS
    return [level(known[k * size : (k + 1) * size]) for k in range(PARTS)]


def _section(role: str) -> str:
    sections = (
        "prompts",
        "examples",
        "rollout",
        "environment",
        "agent",
        "gateway",
        "reward",
        "advantages",
        "trainer",
        "critic",
    )
    return role if role in sections else f"roles.{role}"
