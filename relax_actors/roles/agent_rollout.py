"""Rollout whose samples are worked out by agents, which ask the policy through the gateway."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

from broker.subjects import RowId
from relax_actors.data.prompt_maker import room
from relax_actors.errors import ConfigError, RelaxError, RowError, RowTakenError
from relax_actors.generation.sampling import Sampling
from relax_actors.media.family import family_of
from relax_actors.messages import FinishReason, Sample, Trajectory
from relax_actors.messages.samples import PLAYER_REWARD, TRUNCATED
from relax_actors.registry.role_spec import RoleSpec
from relax_actors.roles.rollout import Rollout
from relax_actors.runtime import Drop, Row
from relax_actors.sessions.agent_sessions import AgentSessions
from relax_actors.sessions.dialogue import Dialogue
from relax_actors.sessions.episode_group import trajectory_of
from relax_actors.sessions.episode_start import task_of
from relax_actors.sessions.message_media import task_messages
from relax_actors.sessions.service import GenerationService
from relax_actors.sessions.session_book import Session

WAIT_SECONDS = 0.2
"""Longest wait for a request or the end of a sample before rows are looked for again."""
OPEN_SECONDS = 60.0
NO_REWARD = (
    'no agent has reported a reward, which the reward "environment" needs: write {"reward": <number>} to the file '
    "$RELAX_RESULT_FILE, return it from agent.function, or send it to /sessions/<id>/end (with agent.players, "
    '{"rewards": {<player>: <number>}}); or name a reward.function that scores the conversation'
)
ALL_FAILED = (
    "those of all samples failed, agent.retries times and once more; the events `agent_failed` say why, and the output "
    "of commands is in the folder agents of the run"
)
NO_ANSWER = "no_answer"
"""Reason of a row that is dropped because no agent did anything with it."""


class AgentRollout(Rollout):
    """Offers samples to agents, generates their requests, and writes their turns.

    Each answer is a turn in a forest of its sample (`sessions.forest`). The table has it before the agent does, so that
    an actor that takes the row over knows all that the agent knows.
    """

    spec: ClassVar[RoleSpec] = replace(Rollout.spec, turns=True)
    isolates_suspects: ClassVar[bool] = False
    """Agents that wait for their rows would leave a row that is held alone without agents. What kills an actor is a
    request, and the gateway stops sending it (`serving.suspect_calls`)."""

    def setup(self) -> None:
        """Build the engine and serve sessions; raises ConfigError for an unfit chat template."""
        self._news: queue.SimpleQueue[RowId | None] = queue.SimpleQueue()
        super().setup()
        self._policy.on_service(lambda: self._news.put(None))

    def start_service(self, service: GenerationService) -> None:
        """Begin to answer requests of agents."""
        config = self.context.config
        family = family_of(config.model_path)
        dialogue = Dialogue(self._tokenizer, () if family is None else family.kinds)
        self._hosts = None
        if config.environment is not None:
            from relax_actors.envs.client import EnvironmentClient  # noqa: PLC0415 `relax check` needs no NATS

            self._hosts = EnvironmentClient(self.context)
        if not self._tokenizer.chat_template:
            msg = "[agent] needs a model with a chat template; add chat_template.jinja to the model folder"
            raise ConfigError(msg)
        limit = min(self._engine.context_length, room(config))
        self._sessions = AgentSessions(self.context, dialogue, service, limit, self._news.put, self._shown, self._hosts)
        service.start(self._sessions)

    def most_service_requests(self) -> int:
        """Return the most concurrent requests: one for each sample of the rows, or more."""
        return max(super().most_service_requests(), self.row_limit() * self.context.config.most_samples)

    def make_work(self, sampling: Sampling) -> _AgentWork:
        """Return the rows whose samples are offered to agents."""
        return _AgentWork(self, sampling)

    def offer(self, row: Row, sampling: Sampling) -> None:
        """Offer the samples of a row to agents."""
        prompt, agent = row.prompt, self.context.config.agent
        task: dict[str, Any] = {"prompt": prompt.text, "messages": task_messages(prompt), "metadata": prompt.metadata}
        task["held_out"] = row.is_eval
        if agent is not None and agent.shows_answer:
            task["answer"] = prompt.answer
        own = task_of(prompt)
        sessions = [
            Session(row.id, n, task, prompt.seed, sampling=sampling, media=prompt.media, environment_task=own)
            for n in range(sampling.samples)
        ]
        self.context.table.connection.call(self._sessions.open(row.id, sessions), OPEN_SECONDS)

    def withdraw(self, row: RowId) -> list[Session] | RowTakenError:
        """Offer the samples of a row no more; return them, or why another actor has the row."""
        return self.context.table.connection.call(self._sessions.close(row), OPEN_SECONDS)

    def news(self, seconds: float) -> list[RowId]:
        """Wait for news, this long at most; return the rows that may be over."""
        rows: list[RowId] = []
        # No wait beside requests that can be generated.
        waits = seconds if not self._policy.service_waiting else 0
        with suppress(queue.Empty):
            news = self._news.get(timeout=waits) if waits else self._news.get_nowait()
            while True:
                if news is not None and news not in rows:
                    rows.append(news)
                news = self._news.get_nowait()
        return rows

    def result_of(self, row: Row) -> Trajectory | Drop | RelaxError:
        """Return the result of a row whose samples have ended."""
        sessions = self.withdraw(row.id)
        if isinstance(sessions, RowTakenError):
            return sessions
        try:
            each = [self._sample(session, row) for session in sessions]
            baselines = 0 if row.is_eval else self._baselines
            samples = [sample for sample in each if sample is not None]
            if len(samples) <= baselines or None in each[len(each) - baselines :]:
                return self._end_without_samples(sessions, row)
            if not any(one.loss_mask.any() for sample in samples for one in sample.sequences):
                return Drop(NO_ANSWER, "no player of agent.trained has got an answer of the policy")
            prompt = row.prompt.tokens if self._media is None else row.media.tokens
            trajectory = trajectory_of(prompt, samples, baselines, self._stager.served)
        except ValueError as error:
            return RowError(f"agents of {row.id}: {error}")
        if not row.is_eval and (why := self._validator.of_trajectory(trajectory, row.id.step)):
            return RowError(f"agents of {row.id}: {why}")
        self._generated_tokens += sum(len(sample.tokens) for sample in samples)
        return trajectory

    def _end_without_samples(self, sessions: Sequence[Session], row: Row) -> Drop | RowError:
        if any(self._lacks_reward(session, row) for session in sessions):
            return RowError(f"agents of {row.id}: {NO_REWARD}")
        if all(session.has_failed for session in sessions):
            return RowError(f"agents of {row.id}: {ALL_FAILED}")
        of = "its greedy sample" if any(session.forest.leaves() for session in sessions) else "the row"
        return Drop(NO_ANSWER, f"no agent of {of} has got an answer of the policy, and ended well")

    def _lacks_reward(self, session: Session, row: Row) -> bool:
        """Whether a session's agent ended well without the reward that scores the row."""
        state = session.state
        if state is None or state.reason != FinishReason.STOP or session.has_reward(self.context.config.players):
            return False
        return bool(session.forest.leaves()) and self.context.config.takes_reported_reward(row.id)

    def _sample(self, session: Session, row: Row) -> Sample | None:
        """Return the sample of a session; None if it is empty, or failed and is left out.

        Where samples that failed are not left out, they have reward 0.
        """
        agent, state, forest = self.context.config.agent, session.state, session.forest
        if agent is None or state is None or not forest.leaves():
            return None
        failed = session.has_failed or self._lacks_reward(session, row)
        if failed and agent.on_error != "zero" and not row.is_eval:
            return None
        metrics = {
            **{f"agent/{name}": value for name, value in state.metrics.items()},
            **{f"environment/{name}": value for step in session.steps for name, value in step.seen.metrics.items()},
            "turns": float(len(forest.exported())),
            "branches": float(len(forest.leaves())),
            "retries": float(state.attempt),
        }
        players = agent.players or ("",)
        if session.has_reward(agent.players) or state.reason in TRUNCATED or failed:
            rewards = {player: state.rewards.get(player, 0.0) for player in agent.players}
            metrics |= {f"{PLAYER_REWARD}{player}": reward for player, reward in rewards.items()}
            trained = sum(rewards[player] for player in agent.trained_players)
            metrics["environment_reward"] = trained if agent.players else session.reward or 0.0
        is_baseline = session.greedy and not row.is_eval
        untrained = set() if row.is_eval else set(agent.players).difference(agent.trained_players)
        return Sample(
            tuple(
                one.masked() if is_baseline or one.player in untrained else one
                for one in forest.sequences(agent.branches, players=players)
            ),
            self._tokenizer.decode(forest.turns[forest.last].tokens),
            FinishReason(state.reason),
            metrics,
            messages=forest.said(players),
        )

    def close(self) -> None:
        """Close the environments, the stager and the engine."""
        if self._hosts is not None:
            self._hosts.close()
        super().close()

    def metrics(self) -> dict[str, float]:
        """Return those of every rollout, and the sessions and turns of agents."""
        counts = self._sessions.book.counts()
        return {
            **super().metrics(),
            **{f"sessions_{name}": count for name, count in counts.items()},
            "agent_turns": self._sessions.turns,
            "agent_replays": self._sessions.replays,
            "agent_branches": self._sessions.branches,
        }


class _AgentWork:
    """Rows whose samples agents work out; see `relax_actors.generation.rows.Work`.

    Requests of agents join the running batch as they come, and rows are held and leave between two tokens.
    """

    uses_service = True

    def __init__(self, role: AgentRollout, sampling: Sampling) -> None:
        self._role, self._sampling = role, sampling
        self._held: dict[RowId, Row] = {}
        self._over: list[Row] = []

    def __len__(self) -> int:
        """Return the number of rows that are held."""
        return len(self._held) + len(self._over)

    def room(self, limit: int) -> int:
        """Return how many rows may be held: they need no room of their own."""
        del limit
        return self._role.row_limit() - len(self)

    def open(self, rows: Sequence[Row]) -> list[tuple[Row, RelaxError]]:
        """Offer the samples of rows to agents."""
        for row in rows:
            self._held[row.id] = row
            self._role.offer(row, self._sampling)
        return []

    def exchange(self) -> None:
        """Look for rows that are over."""
        self._look(0)

    def wait(self) -> None:
        """Wait a short time for a request or the end of a sample."""
        self._look(WAIT_SECONDS)

    def _look(self, seconds: float) -> None:
        self._over += [self._held.pop(row) for row in self._role.news(seconds) if row in self._held]

    def results(self) -> list[tuple[Row, Any]]:
        """Return the rows that are over."""
        self._look(0)
        over, self._over = self._over, []
        return [(row, self._role.result_of(row)) for row in over]

    def close(self) -> None:
        """Withdraw the rows that are held."""
        for row in [*self._held, *(row.id for row in self._over)]:
            self._role.withdraw(row)
        self._role.news(0)  # old news must not be taken for news of a row that is delivered again
