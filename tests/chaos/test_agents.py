"""Rollout actors that are killed or stopped while agents work: answers stay the same, and late ones are refused."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx
import pytest

from broker.subjects import RowId
from relax_actors.messages import Trajectory
from tests.support.faults import box, story_of
from tests.support.gateways import AGENTS, address_of
from tests.support.kept_runs import ENTROPIES, recorded_entropies
from tests.support.kills import kill_actors
from tests.support.messages import assert_says
from tests.support.running import ON_POLICY, Run, wait_until

MakeRun = Callable[..., Run]
SETTINGS = (
    "model.architecture.max_position_embeddings=4096",
    "trainer.max_tokens_per_microbatch=4096",
    "trainer.checkpoint_every=100",
    "rollout.max_tokens=3000",
    "rollout.min_tokens=3000",
    "rollout.replicas=2",
    "rollout.group_size=1",
    "algorithm.advantage=returns",
    "rollout.max_concurrent_prompts=1",
    "supervision.ack_wait=1",
    "supervision.heartbeat=600",
    "supervision.intensity=50",
    "reward.function=environment",
    "agent.idle_seconds=300",
    "run.steps=2",
    "trainer.prompts_per_step=1",
    "staleness.max=0",
)


class Agent:
    """An agent that was started elsewhere, in one conversation.

    Attributes:
        messages: the conversation so far.
    """

    def __init__(self, client: httpx.Client, token: str) -> None:
        self._client, own = client, {"Authorization": f"Bearer {token}"}

        def take() -> dict[str, Any] | None:
            answer = client.post("/sessions", headers=own)
            return dict(answer.json()) if answer.status_code == 200 else None

        session = wait_until(take, "sample", 240)
        self.id, self.messages = str(session["id"]), list(session["task"]["messages"])
        self._head = {"Authorization": f"Bearer {session['token']}"}

    @property
    def row(self) -> RowId:
        kind, step, index, *_ = self.id.split("-")
        return RowId(int(step), int(index), kind)

    def _body(self, **more: Any) -> dict[str, Any]:
        return {"headers": self._head, "json": {"messages": self.messages, **more}}

    def ask(self) -> list[int]:
        """Ask for three tokens; return them."""
        body = self._body(max_tokens=3, return_token_ids=True)

        def answer() -> httpx.Response | None:
            with suppress(httpx.TransportError):  # while the gateway is restarted
                return self._client.post(f"/sessions/{self.id}/v1/chat/completions", **body)
            return None

        (choice,) = wait_until(answer, "gateway").raise_for_status().json()["choices"]
        self.messages += [choice["message"], {"role": "user", "content": "again"}]
        return list(choice["token_ids"])

    def ask_long(self, on_piece: Callable[[], object]) -> None:
        """Ask for a long answer, and call back when a part of it has arrived; return when the connection is lost."""
        url, body = f"/sessions/{self.id}/v1/chat/completions", self._body(stream=True)
        with pytest.raises(httpx.TransportError), self._client.stream("POST", url, **body) as answer:
            for n, _ in enumerate(answer.iter_lines()):
                if n == 4:  # a few events
                    on_piece()

    def end(self) -> None:
        self._client.post(f"/sessions/{self.id}/end", headers=self._head, json={"reward": 1.0}).raise_for_status()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_actor_that_continues_after_its_row_was_taken_over_adds_nothing_to_it(make_run: MakeRun) -> None:
    run = make_run("late", *SETTINGS, config=AGENTS).start()
    url, token = address_of(run)
    with httpx.Client(base_url=url, timeout=200) as client:
        agent = Agent(client, token)
        answers = [agent.ask()]
        holder = next(f"rollout.{n}" for n in range(2) if str(agent.row) in box(run, f"rollout.{n}").rows)
        other = "rollout.1" if holder == "rollout.0" else "rollout.0"
        stopped: list[int] = []

        def cut_off() -> None:
            """Stop the actor in mid-answer; without a gateway nobody tells it later that its client has left."""
            stopped.append(run.kill(holder, signal.SIGSTOP))
            run.kill("gateway.0")

        agent.ask_long(cut_off)
        answers.append(agent.ask())
        os.kill(stopped[0], signal.SIGCONT)
        wait_until(lambda: story_of(run).of("row_taken"), "end of the late answer", 60)
        run.kill(other)
        answers.append(agent.ask())
        agent.end()
        subject = run.table.subject(agent.row, "trajectory")
        found = wait_until(lambda: run.table.fetch(subject, Trajectory), "trajectory", 60)
        rest = Agent(client, token)
        rest.ask()
        rest.end()
    # On a busy machine another actor may be taken for dead as well.
    lost = {(f"{event['role']}.{event['n']}", event["row"]): event["error"] for event in story_of(run).of("row_taken")}
    assert_says(lost[holder, str(agent.row)], agent.row, "send the request again")
    # Of the answer that was cut off nothing is trained.
    assert found.token_ids[found.trained].tolist() == [token for answer in answers for token in answer]
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert (result["steps"], result["trained"]) == (2, 2)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_players_of_killed_agents_say_what_they_would_have_said(make_run: MakeRun) -> None:
    settings = (
        *ON_POLICY,
        *ENTROPIES,
        "agent.function=tiny_agents.duel",
        "agent.players=['solver', 'critic']",
        "agent.trained=['critic']",
        "agent.retries=20",
        "agent.lease_seconds=3",
        "reward.function=environment",
        "run.steps=5",
    )
    calm = make_run("calm", *settings, config=AGENTS)
    alone = calm.complete_healthy()
    run = make_run("killed", *settings, config=AGENTS).start()
    kills = [
        ("group.0.1.turns.0.2", "rollout.0"),
        ("group.1.0.turns.0.3", "gateway.0"),
        ("group.2.0.turns.0.2", "agent.0"),
        ("group.3.1.turns.0.2", "rollout.0"),
    ]
    kill_actors(run, kills)
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert result["weights_fingerprint"] == alone["weights_fingerprint"]
    assert (result["dropped"], result["quarantined"], result["in_flight"]) == (0, 0, 0)
    entropies = recorded_entropies(run)
    assert (len(entropies), entropies) == (result["trained"], recorded_entropies(calm))
