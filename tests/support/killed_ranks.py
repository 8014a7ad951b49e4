"""Runs whose ranks, of a trainer or critic, are killed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tests.chaos.equivalence import final_weights
from tests.support.faults import Story, story_of, wait_for_cell
from tests.support.kills import recorded_death, stopped_root
from tests.support.running import DEADLINE, TINY, Run, processes_of


def rank_of(run: Run, rank: int, role: str = "trainer") -> int | None:
    """Process of a rank; None while it is restarted."""
    for pid in processes_of(run.folder.root):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if "relax_actors.engines.ranks.rank" in command and command[-3:-1] == [role, str(rank)]:
            return pid
    return None


Moments = tuple[tuple[str, int | None], ...]
"""Cells after which a rank is killed, or the actor for None."""


def kill_ranks(run: Run, role: str, moments: Moments) -> None:
    """Kill ranks of a role, or its actor, one after the other; an actor dies with a rank."""
    actor = f"{role}.0"
    wait_for_cell(run, moments[0][0], DEADLINE)
    with stopped_root(run):
        for cell, rank in moments:
            wait_for_cell(run, cell, DEADLINE)
            with recorded_death(run, actor):
                run.strike(partial(run.pid_of, actor) if rank is None else partial(rank_of, run, rank, role), actor)


def check_killed_ranks(
    make_run: Callable[..., Run], settings: Sequence[str], role: str, moments: Moments, config: Path = TINY
) -> Story:
    """Compare the weights of a run whose ranks are killed with those of a calm run; return what happened in it."""
    calm = make_run("calm", *settings, config=config)
    expected = final_weights(calm, calm.complete())
    run = make_run("killed", *settings, config=config).start()
    kill_ranks(run, role, moments)
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert final_weights(run, result) == expected
    assert (result["dropped"], result["quarantined"], result["in_flight"]) == (0, 0, 0)
    story = story_of(run)
    assert story.of("replay_diverged") == []
    crashed = [event for event in story.of("crashed") if event["role"] == role]
    assert len(crashed) == len(moments)
    assert all("SIGKILL" in event["reason"] for event in crashed)
    assert processes_of(run.folder.root) == []
    return story
