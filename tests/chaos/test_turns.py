"""Whatever is killed in the middle of episodes, no written turn is generated again and the weights are the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from relax_actors.messages import SessionLog
from tests.support.faults import hit, story_of, wait_for_cell
from tests.support.kept_runs import ENTROPIES, recorded_entropies
from tests.support.kills import kill_actors
from tests.support.running import IMAGES, ON_POLICY, Run, processes_of, wait_until
from tests.support.turn_counter import TurnCounter

EPISODES = (
    "environment.name=tiny_pick.Pick",
    "environment.options.pause=0.05",
    "data.function=tiny_pick.make",
    "rollout.max_tokens=2",
    "rollout.turn_log_after=0",
    "reward.function=environment",
    "run.steps=6",
)
PICTURES = (
    "environment.name=tiny_images.Look",
    "environment.options.pause=0.05",
    "rollout.turn_log_after=0",
    "reward.function=environment",
)
PICTURE_KILLS = (
    ("group.1.0.turns.0.0", "rollout.0"),
    ("group.1.2.turns.0.0", "environment.0"),
    ("group.2.1.turns.0.1", "rollout.0"),
    ("group.3.0.turns.0.0", "media.0"),
    ("group.3.2.turns.0.1", "rollout.0"),
    ("group.4.1.turns.0.0", "environment.0"),
)
DUEL = ("environment.name=tiny_duel.Duel", "environment.players=['solver', 'critic']")
RIVALS = (
    *DUEL,
    "algorithm.name=hierarchical_grpo",
    "algorithm.rivals=['solver', 'critic']",
    "algorithm.observation_nll=0.05",
)
KILLS = (
    ("group.1.0.turns.0.1", "rollout.0"),
    ("group.1.2.turns.0.0", "environment.0"),
    ("group.2.1.turns.0.2", "broker"),
    ("group.3.0.turns.0.0", "environment.0"),
    ("group.3.2.turns.0.1", "rollout.0"),
    ("group.4.1.turns.0.1", "node"),
)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "settings", [(), (*DUEL, "environment.trained=['critic']"), RIVALS], ids=["alone", "players", "rivals"]
)
def test_killed_episodes_continue_at_their_turn(settings: tuple[str, ...], make_run: Callable[..., Run]) -> None:
    calm = make_run("calm", *ON_POLICY, *EPISODES, *ENTROPIES, *settings)
    alone = calm.complete_healthy()
    run = make_run("killed", *ON_POLICY, *EPISODES, *ENTROPIES, *settings).start()
    counter = TurnCounter(run)
    for cell, victim in KILLS:
        wait_for_cell(run, cell, 180)
        hit(run, victim)
    run.disconnect()
    code, result, said = run.finish()
    counter.close()
    assert code == 0, said
    assert result["weights_fingerprint"] == alone["weights_fingerprint"]
    assert (result["dropped"], result["quarantined"], result["in_flight"]) == (0, 0, 0)
    assert counter.twice == []
    assert len(counter.turns) > 100
    story = story_of(run)
    assert story.of("row_resumed")
    assert [event["error"] for event in story.of("environment_failed")] == []
    assert processes_of(run.folder.root) == []
    entropies = recorded_entropies(run)
    assert (len(entropies), entropies) == (result["trained"], recorded_entropies(calm))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_work_beyond_the_bound_of_the_turn_log_is_not_repeated(make_run: Callable[..., Run]) -> None:
    settings = (*ON_POLICY, *EPISODES, "environment.options.pause=2", "rollout.turn_log_after=1", "run.steps=2")
    alone = make_run("calm", *settings).complete()
    run = make_run("killed", *settings).start()
    counter = TurnCounter(run)
    cells: list[SessionLog] = []
    for row in ("group.0.0", "group.1.1"):
        subject = f"relax.{run.name}.{row}.turns.0.0"
        wait_until(lambda subject=subject: run.table.get(subject), subject, 180)
        hit(run, "rollout.0")
        cell = run.table.fetch(subject, SessionLog)
        assert cell is not None
        cells.append(cell)
    run.disconnect()
    code, result, said = run.finish()
    counter.close()
    assert code == 0, said
    assert result["weights_fingerprint"] == alone["weights_fingerprint"]
    assert counter.twice == []
    assert all(cell.seconds >= 1 for cell in cells)
    assert len(story_of(run).of("row_resumed")) >= 2
    assert max(turn.number for cell in cells for turn in cell.turns) >= 1, "cells of earlier work were written"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_episodes_with_pictures_continue_at_their_turn(make_run: Callable[..., Run]) -> None:
    alone = make_run("calm", *ON_POLICY, *PICTURES, config=IMAGES).complete()
    run = make_run("killed", *ON_POLICY, *PICTURES, config=IMAGES).start()
    counter = TurnCounter(run)
    kill_actors(run, PICTURE_KILLS)
    run.disconnect()
    code, result, said = run.finish()
    counter.close()
    assert code == 0, said
    assert result["weights_fingerprint"] == alone["weights_fingerprint"]
    assert (result["dropped"], result["quarantined"], result["in_flight"]) == (0, 0, 0)
    assert counter.twice == []
    story = story_of(run)
    assert story.of("row_resumed")
    assert story.of("environment_failed") == []
    steps = story.steps()
    assert all(step["abs_delta"] < 1e-5 for step in steps)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_turns_with_pictures_that_join_a_running_batch_have_the_logprobs_of_the_trainer(
    make_run: Callable[..., Run],
) -> None:
    run = make_run("joined", *PICTURES, "staleness.max=0", "environment.options.opens=true", config=IMAGES)
    assert run.complete()["trained"] == 24
    story = story_of(run)
    steps = story.steps()
    assert len(steps) == 6
    assert all(step["abs_delta"] < 1e-5 for step in steps)
    assert max(metric["turns"] for metric in story.metrics if "turns" in metric) > 200


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "settings", [("environment.credit=turn", "environment.discount=0.9"), DUEL], ids=["credit", "players"]
)
def test_turns_that_join_a_running_batch_have_the_logprobs_of_the_trainer(
    settings: tuple[str, ...], make_run: Callable[..., Run]
) -> None:
    run = make_run("joined", *EPISODES, *settings, "staleness.max=0")
    assert run.complete()["trained"] == 24
    story = story_of(run)
    steps = story.steps()
    assert len(steps) == 6
    assert all(step["abs_delta"] < 1e-5 for step in steps)
    turns = [metric["turns"] for metric in story.metrics if "turns" in metric]
    assert max(turns) > 200
