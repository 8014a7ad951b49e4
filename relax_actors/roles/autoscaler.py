"""Role `autoscaler`: measures a run, and requests operations that scale rollouts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from relax_actors.autoscaling.decision import Action, Decision, Figures, Place, Timers, decide, place_for
from relax_actors.config.autoscaler import AutoscalerSection
from relax_actors.config.rows import admitted_rows
from relax_actors.data.checked_run import CheckedRun
from relax_actors.errors import ConfigError, RelaxError
from relax_actors.messages.operations import OperationRequest
from relax_actors.operations.plan import FIRST_ENGINE
from relax_actors.operations.states import Operation, State
from relax_actors.registry.role_spec import RoleSpec
from relax_actors.runtime.service_role import ServiceRole

if TYPE_CHECKING:  # `relax check` loads every role, and needs no NATS
    from nats.js.api import ConsumerInfo

ROLE = "rollout"
LOOK_SECONDS = 10.0
"""Seconds for one look at the run."""
STARVES = "rows of step"
"""Beginning of what the trainer's lease says while it waits for rows."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Rollouts of a run, as the leases of the nodes tell.

    Attributes:
        engines: on nodes not marked as spot, those that stop excepted.
        spot: on nodes marked as spot, those that work.
        restarts: of all of them.
        places: nodes that may be scaled, by number.
        working: all that hold rows.
    """

    engines: int
    spot: int
    restarts: int
    places: tuple[Place, ...] = ()
    working: int = 0

    @property
    def least(self) -> int:
        """Number of rollouts that remain at least when one node is scaled, which keeps one."""
        return self.engines - max((place.engines for place in self.places), default=1) + 1


def pool_of(nodes: Mapping[str, Mapping[str, Any]], wanted: str) -> Pool:
    """Count the rollouts on the node `wanted`, or on all; leases may be forged."""
    places: dict[int, Place] = {}
    engines = spot = restarts = working = 0
    for key, node in nodes.items():
        children = node.get("children")
        actors = children if isinstance(children, dict) else {}
        living = {
            int(number): state
            for name, state in actors.items()
            for role, _, number in [str(name).rpartition(".")]
            if role == ROLE and number.isdecimal() and isinstance(state, dict)
            if state.get("phase") not in ("stopping", "ended")
        }
        restarts += sum(number for s in living.values() if type(number := s.get("restarts")) is int)
        busy = sum(s.get("phase") == "ready" and s.get("works") is True for s in living.values())
        working += busy
        if node.get("spot") is True:
            spot += busy
            continue
        engines += len(living)
        number, own = key.rpartition(".")[2], sum(n < FIRST_ENGINE for n in living)
        if own and number.isdecimal() and wanted in ("", number, node.get("name")):
            places[int(number)] = Place(int(number), own, _room(node), len(actors))
    return Pool(engines, spot, restarts, tuple(places[number] for number in sorted(places)), working)


def _room(node: Mapping[str, Any]) -> int | None:
    """Return for how many rollouts a node has free GPUs; None without a limit."""
    room = node.get("room")
    number = room.get(ROLE) if isinstance(room, dict) else None
    return number if type(number) is int and number >= 0 else None


def failures_of(operations: Iterable[Operation], author: str) -> int:
    """Count an author's failed operations since the last success, in order of requests."""
    ends = [operation.state for operation in operations if operation.request.author == author and operation.is_over]
    return next((n for n, state in enumerate(reversed(ends)) if state is not State.FAILED), len(ends))


class Autoscaler(ServiceRole):
    """Decides every `autoscaler.interval` seconds; see `autoscaling.decision`.

    It keeps nothing that outlives it: an incarnation begins with timers and cool-downs at zero, so that a kill delays a
    change and never repeats one.
    """

    spec: ClassVar = RoleSpec(
        section="autoscaler",
        requires="autoscaler",
        rows="sampled",
        observes=(ROLE,),
        operates=True,
        single=True,
        start_order=46,
    )

    def check(self, run: CheckedRun) -> Iterator[str]:
        """Note how many rollouts can be busy; raises ConfigError for bad bounds."""
        config, section = run.config, run.config.autoscaler
        if section is None:
            return
        if config.rollout.replicas > section.max:
            msg = (
                f"rollout.replicas = {config.rollout.replicas} is above autoscaler.max = {section.max}; lower it or "
                "raise the bound"
            )
            raise ConfigError(msg)
        rows, each = admitted_rows(config), config.rollout.max_concurrent_prompts
        most = -(-rows // each)
        if most < section.max:
            yield (
                f"autoscaler.max = {section.max}, but {rows} rows are admitted at once "
                f"(trainer.prompts_per_step x (staleness.max + 1)) and {most} rollouts of "
                f"rollout.max_concurrent_prompts = {each} hold all of them: there will never be more, unless held-out "
                "rows wait, too"
            )

    def setup(self) -> None:
        """Read the settings."""
        from relax_actors.operations import OperationLog  # noqa: PLC0415 imports NATS

        config = self.context.config
        assert config.autoscaler is not None  # noqa: S101 the run has the role by this section
        self._section: AutoscalerSection = config.autoscaler
        self._rows = config.rollout.max_concurrent_prompts
        self._author = f"{self.context.role}.{self.context.n}"
        self._timers = Timers(changed=time.monotonic())
        self._operations = OperationLog(self.context.table)
        self._decisions = self._requests = 0
        self._last: tuple[Action, str] | None = None
        self._needed = -1

    async def start(self) -> None:
        """Begin to look."""
        self._looking = asyncio.create_task(self._look_forever())
        self._looking.add_done_callback(self._on_end)

    def _on_end(self, looking: asyncio.Task[None]) -> None:
        if not looking.cancelled() and (error := looking.exception()) is not None:
            self.fail(error)

    async def stop(self) -> None:
        """Look no more."""
        self._looking.cancel()

    def handled(self) -> int:
        """Return the number of decisions."""
        return self._decisions

    def metrics(self) -> dict[str, float]:
        """Return the number of rollouts that the run can use; -1 if unknown."""
        return {"rollouts_needed": float(self._needed)}

    async def _look_forever(self) -> None:
        while True:
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    figures, pool = await self._measure()
            except (RelaxError, TimeoutError):
                figures, pool = Figures(waiting=None, in_hand=None, rows_per_engine=1, engines=None), None
            decision, timers = decide(self._section, figures, self._timers, time.monotonic())
            self._decisions += 1
            self._needed = -1 if decision.needed is None else decision.needed
            await self._carry_out(decision, figures, pool)
            self._timers = timers
            await asyncio.sleep(self._section.interval)

    async def _measure(self) -> tuple[Figures, Pool]:
        """Measure the run; raises RelaxError or TimeoutError if the broker does not answer."""
        from broker.streams import find_consumer  # noqa: PLC0415 `relax check` loads every role

        context = self.context
        stream = context.table.subjects.table_stream
        info = await find_consumer(context.table.connection, stream, ROLE)
        nodes, trainer = await asyncio.gather(context.state.leases("node"), context.state.lease("trainer", 0))
        pool = pool_of(nodes, self._section.node)
        history = await self._operations.read_async()
        waiting = None if info is None else info.num_pending
        figures = Figures(
            waiting=waiting,
            in_hand=None if info is None else info.num_ack_pending,
            rows_per_engine=self._rows,
            engines=pool.engines if pool.places else None,
            least=pool.least if pool.places else 0,
            spot=pool.spot,
            working=pool.working,
            oldest=await self._age_of_oldest(info) if info is not None and waiting else 0.0,
            starving=None if trainer is None else str(trainer.get("waits_for") or "").startswith(STARVES),
            restarts=pool.restarts,
            changing=any(operation.request.role == ROLE for operation in history.running),
            failures=failures_of(history.operations.values(), self._author),
        )
        return figures, pool

    async def _age_of_oldest(self, info: ConsumerInfo) -> float | None:
        """Return the age in seconds of the oldest row that waits for a rollout, or None."""
        table, delivered = self.context.table, info.delivered
        after = 1 + (0 if delivered is None else delivered.stream_seq)
        filters = info.config.filter_subjects or [str(info.config.filter_subject)]
        messages = await asyncio.gather(*(table.find_next_async(name, after) for name in filters))
        times = [message.time.timestamp() for message in messages if message is not None and message.time is not None]
        return max(0.0, time.time() - min(times)) if times else None

    async def _carry_out(self, decision: Decision, figures: Figures, pool: Pool | None) -> None:
        """Request an operation and publish the decision; holds are published when they change."""
        operation, refused = None, ""
        choice = None
        if decision.action is not Action.HOLD and pool is not None:
            choice = place_for(pool.places, decision.engines - pool.engines)
            refused = "" if choice is not None else "no node has free GPUs for a further rollout"
        if choice is not None and not self._section.dry_run:
            place, target = choice
            self._requests += 1
            request = OperationRequest(
                "scale",
                ROLE,
                target=target,
                node=str(place.node),
                key=f"{self._author}#{self.context.incarnation}-{self._requests}",
                author=self._author,
            )
            try:
                operation = (await self._operations.request_async(request)).id
            except RelaxError as error:  # another client changes the rollouts, or the broker is away
                refused = str(error)[:500]
        said = decision.action, decision.reason
        if decision.action is Action.HOLD and said == self._last:
            return
        self._last = said
        with suppress(RelaxError):
            self.context.journal.event(
                "autoscaled",
                action=decision.action.value,
                before=pool.engines if pool is not None else None,
                after=decision.engines,
                node=None if choice is None else choice[0].node,
                needed=decision.needed,
                reason=decision.reason,
                operation=operation,
                refused=refused,
                dry_run=self._section.dry_run,
                figures={**asdict(figures), "starved": round(self._timers.starved, 3)},
            )
