"""Executor of a run's operations, in the process of the root.

Its decisions follow from the log of operations and from what the nodes report: it keeps no state that another
incarnation would need; only deadlines begin again, see `OperationTimes`. What an operation sets is written after the
cell that says so, and written again as long as the operation runs, so that a root which dies in between loses nothing,
and one that resumes sets it again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Protocol

import nats.errors

from broker.connection import Connection
from broker.errors import BrokerError
from broker.leases import RunState
from broker.store import Store
from broker.streams import CONSUMER_SECONDS, open_bucket
from broker.subjects import Subjects
from broker.table import Table
from relax_actors.config import Config
from relax_actors.errors import ConfigError
from relax_actors.messages import Weights
from relax_actors.messages.operations import OperationPlan, OperationRequest
from relax_actors.operations import ConflictError, History, Operation, OperationLog, State
from relax_actors.operations.engines import MIN_AGE, remove_unused_keys
from relax_actors.operations.log import MAX_TEXT
from relax_actors.operations.plan import nodes_of
from relax_actors.operations.progress import Report, leaving, next_state
from relax_actors.operations.states import IN, OUT, ROLE_KINDS
from relax_actors.roles import role_names, section_of
from relax_actors.runtime.journal import Journal
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.assignment import Code
from relax_actors.supervision.desired import Change, Desired
from relax_actors.supervision.engine_watch import EngineWatch
from relax_actors.supervision.operation_plans import Plans
from relax_actors.supervision.operation_times import OperationTimes
from relax_actors.supervision.replacement import Replacement
from relax_actors.supervision.role_changes import RoleChanges
from relax_actors.supervision.role_moves import RoleMoves
from relax_actors.supervision.streams import change_run_record, fetch_run_record

START_SECONDS = 120.0
"""Time for new actors to start, besides the deadline in which actors that leave finish their rows."""
TRIAL_CRASHES = 2
"""Ends of an actor with new code, by its own fault, after which the code is taken back: a row that ended its process so
often is not yet given up."""
LOST_SECONDS, MOST_DOUBLINGS = 10.0, 6
"""Pause after an attempt to remove a lost engine that failed; it doubles with each attempt, so many times."""


class Operations:
    """Executes the operations of one run. All methods run in one thread, not that of the connection.

    Args:
        table: the run's table, of the operator.
        state: its bucket.
        folder: its folder.
        report: publishes an event.
        times: of the root; see `OperationTimes`.
        open_run: makes streams, consumers and credentials of the roles of a configuration, and publishes it.
    """

    def __init__(
        self,
        table: Table,
        state: RunState,
        folder: RunFolder,
        report: Callable[..., None],
        times: OperationTimes,
        open_run: Callable[[Config], None] = lambda _: None,
    ) -> None:
        self._table, self._state, self._report, self._times = table, state, report, times
        self._log, self._desired = OperationLog(table), Desired(folder, state, table)
        self._engines = EngineWatch(times.now)
        self._replacement = Replacement(folder, times.began, self._publish_copies)
        self._roles = roles = RoleChanges(table, state, folder, open_run, times.had_ended)
        self._moves = moves = RoleMoves(table, state, folder, times.had_ended)
        self._plans = Plans(self._log, self._desired, roles, moves, self._replacement, self._engines, times)
        self._seen: History | None = None
        self._keys_checked_at = float("-inf")

    def step(self) -> None:
        """Take every operation as far as it goes now; call it several times a second."""
        history = self._log.read()
        self._times.look(history, self._desired.replicas)
        self._remove_unused_keys(history)
        self._remove_lost_engines(history)
        if self._roles.has_left:
            leases = self._table.call(self._state.leases())
            nodes = nodes_of(leases)
            self._roles.clean_up(nodes[0].children if 0 in nodes else {}, leases)
        if history is self._seen and not history.running:
            return
        if history is not self._seen:
            self._apply(history)  # a cancelled operation is undone before the next one is planned
        if history.running:
            report = self._look()
            for operation in history.running:
                self._advance_all(operation, report)
            history = self._log.read()
        self._apply(history)
        self._seen = history

    def _advance_all(self, operation: Operation, report: Report) -> None:
        """Take an operation through all states that it has reached. An unexpected error ends this operation alone."""
        try:
            while not operation.is_over and self._advance(operation, report):
                operation = self._log.read().operations[operation.id]
        except (BrokerError, nats.errors.Error, OSError):
            raise  # the next call tries again
        except Exception as error:  # noqa: BLE001 the other operations go on
            self._fail(operation, f"{type(error).__name__}: {error}"[:MAX_TEXT])

    def _look(self) -> Report:
        """Read what the nodes and actors report now."""
        leases = self._table.call(self._state.leases())
        nodes = nodes_of(leases)
        # The lease of a node that ended with the former root is still there for a while.
        if 0 in nodes and nodes[0].since < self._times.began:
            del nodes[0]
        weights = self._table.fetch_last("weights", Weights)
        return Report(nodes, leases, -1 if weights is None else weights.version, time=time.time())

    def _advance(self, operation: Operation, report: Report) -> bool:
        """Move an operation to its next state if it has reached it; return whether it goes on."""
        try:
            self._check_restarts(operation, report)
            moved = self._begin(operation, report) if operation.plan is None else None
        except ConfigError as error:
            if operation.state is State.REPLACING:
                return self._enter(operation, State.RETURNING, reason=str(error)[:MAX_TEXT])
            return self._fail(operation, str(error))
        if moved is not None:
            return moved
        if operation.state in (State.REPLACING, State.RETURNING):
            return self._replace(operation, report)
        if self._is_late(operation) and operation.state in OUT:
            seconds = self._seconds(operation)
            reason = self._roles.waiting.get(operation.id, "see `relax tree`")
            return self._fail(operation, f"it is still {operation.state} after {seconds:g} s; {reason}"[:MAX_TEXT])
        if operation.state is State.REMOVING:
            self._release(operation, report)
        reached = next_state(operation, report)
        return reached is not None and self._enter(operation, reached)

    def _begin(self, operation: Operation, report: Report) -> bool:
        """Plan an operation and enter the first state in which it changes something.

        Raises:
            ConfigError: it cannot be done.
        """
        if 0 not in report.nodes:
            # Also after the run has resumed, when that node takes longer than a short deadline to start.
            if self._times.age(operation.id) > max(START_SECONDS, self._seconds(operation)):
                msg = "the node of `relax up` is not up; see `relax tree`"
                raise ConfigError(msg)
            return False
        begun = self._plans.begin(operation, self._desired.config(), report)
        return begun is not None and self._enter(operation, begun.state, begun.plan, begun.reason)

    def _replace(self, operation: Operation, report: Report) -> bool:
        """Go on with a replacement of code; take the new code back if it is late."""
        if (reached := self._replacement.step(operation, report)) is not None:
            state, reason = reached
            return self._enter(operation, state, reason=reason)
        if self._times.age(operation.id, operation.state) <= self._seconds(operation):
            return False
        reason = f"it is still {operation.state} after {self._seconds(operation):g} s; see `relax tree`"
        if operation.state is State.RETURNING:
            return self._fail(operation, f"{operation.reason}; {reason}")
        return self._enter(operation, State.RETURNING, reason=reason)

    def _publish_copies(self, code: Mapping[str, Code]) -> None:
        """Publish to the nodes that joined which copies of the user's code their actors import."""
        copies = {name: [entry.version, entry.since] for name, entry in code.items()}
        record = self._table.call(fetch_run_record(self._state))
        if record is not None and record.copies != copies:
            self._table.call(change_run_record(self._state, lambda record: replace(record, copies=copies)))

    def _release(self, operation: Operation, report: Report) -> None:
        """Release the leases of actors whose processes are gone; those of killed actors would expire later."""
        plan = None if operation.plan is None else leaving(operation.plan, operation.state)
        # By number: another node that has taken the number may have actors of the same names, which keep their leases.
        node = None if plan is None else report.nodes.get(plan.node)
        for name in () if plan is None else plan.actors:
            if name in report.leases and (node is None or name not in node.children):
                role, _, number = name.rpartition(".")
                self._table.call(self._state.release_lease(role, int(number)))

    def _check_restarts(self, operation: Operation, report: Report) -> None:
        """Give up on actors that end again and again before they take part, before their pool ends the run.

        Raises:
            ConfigError: one has been restarted too often.
        """
        plan = operation.plan
        if plan is None or operation.state not in (*OUT, State.REPLACING):
            return
        most = max(1, self._desired.config().supervision.intensity - 1)
        on_trial = operation.request.kind in ROLE_KINDS
        names = plan.actors
        if operation.state is State.REPLACING:
            # Former ends are no fault of the new code; they count from the start of an actor with it.
            names = [name for name in names if report.child(name).get("code_since") == str(operation.id)]
        for name in names:
            state = report.child(name)
            if operation.state is State.REPLACING and state.get("since", 0.0) < operation.times[State.REPLACING]:
                continue
            restarts, crashes = int(state.get("restarts", 0)), int(state.get("crashes", 0)) if on_trial else 0
            if restarts >= most or crashes >= TRIAL_CRASHES:
                times = crashes if crashes >= TRIAL_CRASHES else restarts
                msg = f"{name} ended {times} times before it took part; see logs/{name}.log in the run's folder"
                raise ConfigError(msg)

    def _is_late(self, operation: Operation) -> bool:
        """Whether the deadline of an operation is over; a role that moves has one to leave, and one to start."""
        starts = operation.request.kind == "move_role" and operation.state in OUT[1:]
        since = State.CREATING if starts else State.PENDING
        return self._times.age(operation.id, since) > self._seconds(operation)

    def _seconds(self, operation: Operation) -> float:
        """Return the deadline of an operation in seconds."""
        config, request = self._desired.config(), operation.request
        role = request.role if request.role in role_names(config) else "rollout"
        one_by_one = (
            1 if operation.state is not State.REPLACING or operation.plan is None else len(operation.plan.actors)
        )
        return request.seconds or one_by_one * (START_SECONDS + section_of(config, role).deadline)

    def _enter(self, operation: Operation, state: State, plan: OperationPlan | None = None, reason: str = "") -> bool:
        entered = self._log.advance(operation.id, state, plan=plan, reason=reason)
        if entered is not None:
            self._publish(entered)
            if not entered.is_over:
                self._apply(self._log.read())
        return entered is not None and not entered.is_over

    def _fail(self, operation: Operation, reason: str) -> bool:
        failed = self._log.advance(operation.id, State.FAILED, reason=reason)
        if failed is not None:
            self._publish(failed)
        return False

    def _publish(self, operation: Operation) -> None:
        plan: dict[str, int | str] = (
            {} if operation.plan is None else {"before": operation.plan.before, "after": operation.plan.after}
        )
        reason = {"reason": operation.reason} if operation.reason else {}
        what = operation.request.url or operation.request.role
        if operation.plan is not None and operation.plan.code:
            plan |= {"code": operation.plan.code, "old_code": operation.plan.old_code}
        self._report("operation", operation=operation.id, state=operation.state.value, what=what, **plan, **reason)

    def _apply(self, history: History) -> None:
        """Set what the operations want of the nodes."""
        changes = [change for o in history.operations.values() if (change := self._change(o, history)) is not None]
        starting = [o for o in history.running if o.request.kind in ROLE_KINDS and o.state not in IN]
        on_probation = [name for o in starting if o.plan is not None for name in o.plan.actors]
        problems = self._roles.apply(history, self._moves.away(history))
        self._moves.apply(history)
        problems |= self._desired.apply(changes, history.engines(), on_probation)
        for operation in history.running:
            if operation.id in problems:
                self._fail(operation, problems[operation.id][:MAX_TEXT])

    def _remove_unused_keys(self, history: History) -> None:
        """Remove the keys of engines that were refused, or have left, some time after their operation."""
        if time.monotonic() - self._keys_checked_at > MIN_AGE / 2:
            self._keys_checked_at = time.monotonic()
            used = {o.request.key_file for o in [*history.engines(), *history.running] if o.request.key_file}
            remove_unused_keys(self._table.store.root, used)

    def _change(self, operation: Operation, history: History) -> Change | None:
        """Return what an operation sets; None if it has ended and left what it set, or if a later one counts."""
        plan, request = operation.plan, operation.request
        # The configuration of `relax up` counts more than what had ended when the root started.
        if plan is None or (plan.node == 0 and self._times.had_ended(operation.id)):
            return None
        later = [o for o in history.operations.values() if o.id > operation.id and o.subject == operation.subject]
        if any(o.plan is not None and _place(o.plan) == _place(plan) for o in later):
            return None
        is_forced = operation.state is State.DRAINING and (request.force or self._is_late(operation))
        expelled = tuple(plan.actors) if is_forced else ()
        if request.kind != "scale":
            is_move, left = request.kind == "move_role", leaving(plan, State.DRAINING)
            # Of a move also without an actor that leaves at once: its node must not kill an actor that comes back.
            return Change(operation.id, left, request.role, None, expelled) if expelled or is_move else None
        undone = operation.state in (State.FAILED, State.CANCELLED)
        number = self._times.number_before(operation.id, plan.before) if undone else plan.after
        return Change(operation.id, plan, request.role, number, expelled)

    def _remove_lost_engines(self, history: History) -> None:
        """Remove external engines that do not answer any more; their rows go to others."""
        active = [o for o in history.engines() if o.state is State.ACTIVE]
        if not active:
            return
        for operation, reason in self._engines.lost(self._desired.config(), active):
            removals = [o for o in history.operations.values() if o.request.engine == operation.id and o.is_over]
            pause = LOST_SECONDS * 2.0 ** min(len(removals), MOST_DOUBLINGS)
            if removals and self._times.age(removals[-1].id, removals[-1].state) < pause:
                continue
            key = f"lost-{operation.id}-{len(removals)}"
            request = OperationRequest("remove_engine", engine=operation.id, force=True, key=key, author="root")
            try:
                if self._log.request(request).state is State.PENDING:
                    self._report("engine_lost", engine=operation.id, url=operation.request.url, reason=reason)
            except ConflictError:
                pass  # it is being removed


def _place(plan: OperationPlan) -> str:
    """Return what identifies the node of a plan: a number may pass from one node that joined to another."""
    return plan.node_name if plan.node else ""


class OperatedRun(Protocol):
    """What operations need of the root of a run."""

    @property
    def config(self) -> Config:
        """The run's configuration."""

    def open_roles(self, connection: Connection, config: Config) -> None:
        """Make streams, consumers and credentials of the roles of a configuration, and publish it."""


def operations_of(
    root: OperatedRun, folder: RunFolder, times: OperationTimes, connection: Connection, journal: Journal
) -> Callable[[], None]:
    """Return a function that executes the operations of a run; see `Operations.step`."""
    config = root.config
    subjects = Subjects(config.run.name)
    state = RunState(connection, connection.call(open_bucket(connection, subjects), CONSUMER_SECONDS + 1))
    store = Store(config.store_path)
    table = Table(connection, subjects, store, "root.0#1", direct=config.broker.replicas == 1)
    return Operations(table, state, folder, journal.event, times, partial(root.open_roles, connection)).step
