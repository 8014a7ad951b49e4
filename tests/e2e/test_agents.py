"""Runs whose samples are worked out by agents: their turns are trained, whatever is killed meanwhile."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from relax_actors.messages import FinishReason, Trajectory
from tests.support.faults import story_of, wait_for_cell
from tests.support.gateways import AGENTS, address_of
from tests.support.kills import kill_actors, stopped_root
from tests.support.messages import assert_says
from tests.support.running import Run, relax, wait_until

MakeRun = Callable[..., Run]
REWARD = ("reward.function=environment",)
ASK = [{"role": "user", "content": "say 7"}]
PROGRAM = """
import json, os, urllib.request
ask = {"messages": [{"role": "user", "content": "say 7"}]}
head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
for _ in range(2):
    body = json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(ask).encode(), head)))
    ask["messages"] += [body["choices"][0]["message"], {"role": "user", "content": "go on"}]
print("x" * 5000000)
assert "SECRET_TOKEN" not in os.environ
json.dump({"reward": 0.5, "metrics": {"asked": 2}}, open(os.environ["RELAX_RESULT_FILE"], "w"))
"""


def trajectories(run: Run) -> list[Trajectory]:
    subjects = run.table.list_subjects(run.table.subjects.column("trajectory"))
    return [found for subject in subjects if (found := run.table.fetch(subject, Trajectory)) is not None]


def trajectories_at(run: Run, cell: str) -> list[Trajectory]:
    """Trajectories of a run that has written a cell, and does not end meanwhile."""
    wait_for_cell(run, "group.0.0.prompt", 240)
    with stopped_root(run):
        wait_for_cell(run, cell, 240)
        return trajectories(run)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_conversations_of_an_sdk_are_trained_with_the_log_probs_of_the_rollout(make_run: MakeRun) -> None:
    settings = ["agent.function=tiny_agents.play", "trainer.checkpoint_every=100", "run.steps=6", *REWARD]
    settings.append("staleness.max=0")  # so that the trainer has the weights that sampled
    run = make_run("sdk", *settings, config=AGENTS).start()
    seen = trajectories_at(run, "batch.2")
    assert len(seen) >= 6
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert (result["steps"], result["trained"]) == (6, 12)
    for trajectory in seen:
        assert trajectory.metrics["turns"] == [3.0, 3.0]
        # An answer that was cut off is not continued: the template would close it with a token that was not sampled.
        spans = [
            sequence.loss_mask[begin:end]
            for sequence in trajectory.sequences
            if sequence.spans is not None
            for begin, end in sequence.spans.tolist()
        ]
        assert sum(mask.all() for mask in spans) == 6, "each of three turns of two samples is trained once"
        assert all(mask.all() or not mask.any() for mask in spans)
    said = relax("tail", f"relax.{run.name}.metric.trainer.>", "--history", cwd=run.cwd).stdout
    deltas = [float(found) for found in re.findall(r'"abs_delta": ([0-9.e+-]+)', said)]
    assert len(deltas) >= 6, said[-2000:]
    assert max(deltas) <= 1e-5, "log-probs of the trainer differ from those that the agents got"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_agents_work_on_held_out_rows_at_their_exact_version_and_failed_samples_are_refilled(make_run: MakeRun) -> None:
    settings = ["agent.function=tiny_agents.fail_once", "agent.on_error=refill", "trainer.checkpoint_every=100"]
    data = ["eval.data.kind=python", "eval.data.function=tiny_tasks.questions", "eval.data.size=4"]
    run = make_run("heldout", *settings, *data, "eval.rows=3", "eval.every=1", "run.steps=4", config=AGENTS).start()
    wait_until(lambda: run.table.get(f"relax.{run.name}.weights.0"), "weights.0", 240)
    seen: dict[str, Trajectory] = {}
    while not run.table.get(f"relax.{run.name}.evaluation.3"):
        for subject in run.table.list_subjects(run.table.subjects.column("trajectory", "*")):
            if subject not in seen and (found := run.table.fetch(subject, Trajectory)) is not None:
                seen[subject] = found
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert (result["steps"], result["trained"]) == (4, 8)
    held_out = {subject: found for subject, found in seen.items() if ".eval." in subject}
    assert held_out
    for subject, trajectory in held_out.items():
        version = int(subject.split(".")[-3])
        assert set(trajectory.versions[trajectory.trained].tolist()) == {version}
        assert (len(trajectory.texts), trajectory.metrics["agent/held_out"]) == (1, [1.0])
    for subject in seen.keys() - held_out.keys():
        assert seen[subject].metrics["agent/held_out"] == [0.0, 0.0]
        assert seen[subject].metrics["retries"] == [1.0, 0.0]
    story = story_of(run)
    assert {event["version"] for event in story.of("evaluated")} == {0, 1, 2, 3, 4}
    assert all(event["rows"] == 3 for event in story.of("evaluated"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_players_of_an_agent_have_rewards_of_their_own_and_one_of_them_is_trained(make_run: MakeRun) -> None:
    settings = ["agent.function=tiny_agents.duel", "agent.players=['solver', 'critic']", "agent.trained=['critic']"]
    settings += ["trainer.checkpoint_every=100", "run.steps=3", "staleness.max=0", *REWARD]
    run = make_run("players", *settings, config=AGENTS).start()
    found = trajectories_at(run, "batch.1")
    assert found
    for trajectory in found:
        assert trajectory.metrics["turns"] == [6.0, 6.0], "two of the solver, two times two of the critic"
        for sample, reward in zip(trajectory.samples, trajectory.metrics["reward/critic"], strict=True):
            assert [one.player for one in sample.sequences] == ["solver", "critic", "critic", "critic"]
            assert [bool(one.loss_mask.any()) for one in sample.sequences] == [False, True, True, True]
            assert sample.metrics["environment_reward"] == reward
            trained = np.concatenate([one.token_ids[one.loss_mask] for one in sample.sequences])
            sampled = np.concatenate([one.token_ids[one.sampled] for one in sample.sequences[1:]])
            assert len(trained) < len(sampled), "the beginning that two sequences share is trained once"
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert (result["steps"], result["trained"]) == (3, 6)
    said = relax("tail", f"relax.{run.name}.metric.trainer.>", "--history", cwd=run.cwd).stdout
    deltas = [float(delta) for delta in re.findall(r'"abs_delta": ([0-9.e+-]+)', said)]
    assert len(deltas) >= 3, said[-2000:]
    assert max(deltas) <= 1e-5, "log-probs of the trainer differ from those that the agents got"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sample_whose_agent_failed_is_trained_with_reward_0(make_run: MakeRun) -> None:
    settings = ["agent.function=tiny_agents.fail_once", "agent.on_error=zero", "agent.retries=0", "run.steps=3"]
    run = make_run("zero", *settings, "trainer.checkpoint_every=100", config=AGENTS).start()
    found = trajectories_at(run, "batch.1")
    assert found
    for trajectory in found:
        assert trajectory.finish_reasons == [FinishReason.ERROR, FinishReason.STOP]
        assert trajectory.metrics["environment_reward"][0] == 0.0
        assert trajectory.trained_lengths.min() > 0
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert result["trained"] == 6


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_agents_that_always_fail_stop_the_run(make_run: MakeRun) -> None:
    run = make_run("failing", "agent.function=tiny_agents.fail_always", "agent.retries=1", config=AGENTS).start()
    code, _, said = run.finish()
    assert code == 1, said
    assert_says(said, "the first", "rows of role rollout", "same error")
    assert_says(said, "RowError: agents of group.", "agent.retries")
    errors = [event["error"] for event in story_of(run).of("agent_failed")]
    assert errors
    assert all(error.startswith("RuntimeError: no such tool in ") for error in errors)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sample_without_a_reward_is_left_out_of_its_group_and_named(make_run: MakeRun) -> None:
    settings = ["agent.function=tiny_agents.forget_reward", "rollout.group_size=3", "run.steps=2", *REWARD]
    run = make_run("noreward", *settings, "trainer.checkpoint_every=100", config=AGENTS).start()
    found = trajectories_at(run, "batch.0")
    assert found
    for trajectory in found:
        assert trajectory.finish_reasons == [FinishReason.STOP, FinishReason.STOP]
        assert trajectory.metrics["retries"] == [0.0, 0.0], "an agent that ended well is not run again"
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert result["trained"] == 4
    named = {event["session"] for event in story_of(run).of("agent_without_reward")}
    assert {f"group-{step}-{index}-0-0" for step in range(2) for index in range(2)} <= named


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_agent_that_never_answers_ends_its_sample_after_agent_seconds(make_run: MakeRun) -> None:
    settings = ["agent.function=tiny_agents.hang", "agent.seconds=6", "run.steps=2", *REWARD]
    run = make_run("hanging", *settings, "trainer.checkpoint_every=100", config=AGENTS).start()
    found = trajectories_at(run, "batch.0")
    assert found
    for trajectory in found:
        assert trajectory.finish_reasons[0] == FinishReason.TIMEOUT
        assert trajectory.metrics["environment_reward"][0] == 0.0
        assert trajectory.metrics["retries"][0] == 0.0, "a sample whose time is over is not given out again"
        assert trajectory.trained_lengths.min() > 0, "what the agent did before is trained"
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert (result["steps"], result["trained"]) == (2, 4)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_run_whose_agents_report_no_reward_stops_with_the_remedy(make_run: MakeRun) -> None:
    settings = ["agent.function=tiny_agents.report_nothing", "run.steps=2", *REWARD]
    run = make_run("norewards", *settings, config=AGENTS).start()
    code, _, said = run.finish()
    assert code != 0
    shown = " ".join(said.split())
    assert_says(shown, "no agent", 'reward "environment"')
    remedies = ("$RELAX_RESULT_FILE", "return it from agent.function", "/sessions/<id>/end", "name a reward.function")
    assert [remedy for remedy in remedies if remedy not in shown] == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_command_agents_are_killed_with_everything_else_and_no_sample_is_lost(
    make_run: MakeRun, tmp_path: Path
) -> None:
    (tmp_path / "agent.py").write_text(PROGRAM)
    command = f'agent.command=["{sys.executable}", "-S", "{tmp_path / "agent.py"}"]'
    settings = [
        command,
        "trainer.checkpoint_every=100",
        "agent.lease_seconds=3",
        "agent.retries=20",
        "run.steps=8",
        "supervision.intensity=50",
        *REWARD,
    ]
    run = make_run("killed", *settings, config=AGENTS).start()
    actors = ("gateway.0", "rollout.0", "agent.0") * 2
    kill_actors(run, ((f"batch.{number}", actor) for number, actor in enumerate(actors)))
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert (result["steps"], result["trained"]) == (8, 16)
    logs = list((run.folder.root / "agents").glob("*/output.log"))
    assert logs
    assert max(path.stat().st_size for path in logs) <= 1 << 20


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_agents_started_elsewhere_take_samples_and_bad_requests_are_told(make_run: MakeRun) -> None:
    settings = ["agent.idle_seconds=60", "agent.max_turns=2", "agent.branches=last", "run.steps=2", *REWARD]
    run = make_run("outside", *settings, config=AGENTS).start()
    url, token = address_of(run)
    with httpx.Client(base_url=url, timeout=60) as client:
        own = {"Authorization": f"Bearer {token}"}

        def taken() -> dict[str, Any] | None:
            answer = client.post("/sessions", headers=own)
            return answer.json() if answer.status_code == 200 else None

        def take() -> dict[str, Any]:
            return wait_until(taken, "sample", 240)

        def ask(session: dict, messages: list, key: str = "") -> httpx.Response:
            head = {"Authorization": f"Bearer {key or session['token']}"}
            return client.post(
                f"/sessions/{session['id']}/v1/chat/completions", headers=head, json={"messages": messages}
            )

        first, second = take(), take()
        assert first["task"]["messages"][0]["content"].startswith("say ")
        assert ask(first, ASK, second["token"]).status_code == 403
        unmatched = ask(first, [*ASK, {"role": "assistant", "content": "never said"}, *ASK])
        assert unmatched.status_code == 200, "a history that matches nothing begins a tree of its own"
        assert ask(first, ASK).status_code == 200
        over = ask(first, [*ASK, *ASK])
        assert (over.status_code, over.json()["error"]["message"]) == (
            410,
            f"session '{first['id']}' is over: it has had 2 answers, the most of a sample",
        )
        too_long = ask(second, [{"role": "user", "content": "say " * 80}])
        assert (too_long.status_code, too_long.json()["error"]["code"]) == (400, "context_length_exceeded")
        big = ask(second, [{"role": "user", "content": "x" * (3 << 20)}])
        assert big.status_code == 413
        # Two steps of two rows of two samples, of which the first has ended.
        for number in range(7):
            session = second if number == 0 else take()
            assert ask(session, session["task"]["messages"]).status_code == 200
            head = {"Authorization": f"Bearer {session['token']}"}
            ended = client.post(f"/sessions/{session['id']}/end", headers=head, json={"reward": 0.25})
            assert ended.status_code == 200
            if number == 5:  # of the second step: the rows of the first one have ended
                gone = ask(first, ASK)
                assert (gone.status_code, gone.json()["error"]["message"]) == (
                    410,
                    f"session '{first['id']}' is over: its row has ended",
                )
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert result["trained"] == 4
