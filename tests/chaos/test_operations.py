"""Kills in every state of an operation: it ends, nothing is lost or left behind, and the weights are the same bits."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from relax_actors.messages import Weights
from relax_actors.messages.operations import OperationRequest
from relax_actors.operations import OperationLog, State
from relax_actors.operations.states import IN, OUT
from tests.support.faults import hit, kill_root, leftovers, port_of, process, story_of, wait_for_cell
from tests.support.gateways import AGENTS, address_of
from tests.support.operation_kills import (
    Met,
    Plan,
    actors_of,
    ended,
    has_entered,
    holdings,
    latin,
    struck,
    wait_for_holdings,
)
from tests.support.running import ON_POLICY, Run, wait_until

MakeRun = Callable[..., Run]
ENDLESS = ("run.steps=100000", "reward.function=tiny_tasks.slower_share_of_sevens", "supervision.heartbeat=4")
OUT_STATES, IN_STATES = OUT[:-1], IN[:-1]
STATES = OUT_STATES + IN_STATES
ACTORS = ("trainer.0", "rollout.0", "gateway.0", "prompts.0", "reward.0", "advantages.0")
TABLE: dict[str, tuple[tuple[str, ...], int]] = {
    "actors": (ACTORS, 2),
    "broker": (("broker", "rollout.1", "zygote"), 1),
    "node": (("node",), 1),
}
"""Processes that a run loses in each state of a scale-out and of a scale-in, and how many of them at once."""
SCALED = ("autoscaler.min=2", "autoscaler.max=2", "autoscaler.interval=0.2", "autoscaler.changes_an_hour=1000")
COOLDOWNS = ("autoscaler.out_cooldown=0", "autoscaler.in_cooldown=0")


def ends_well(run: Run, calm: Run) -> None:
    """Stop a run; check that it lost nothing, left nothing, and has the weights of an undisturbed one."""
    # Kills may have come before the first step.
    wait_until(lambda: (last := run.table.fetch_last("weights", Weights)) and last.version > 0, "a trained step", 120)
    port = port_of(run)
    run.end_in_order()
    wait_until(lambda: not leftovers(run, port), "end of all processes")
    story = story_of(run)
    assert story.of("row_lost") == []
    assert story.of("row_quarantined") == []
    own = story.fingerprints()
    last = max(own)
    assert calm.start(f"run.steps={last}").finish()[0] == 0
    expected = story_of(calm).fingerprints()
    assert {version: print_ for version, print_ in own.items() if expected.get(version) != print_} == {}
    assert last > 0


def scaled(run: Run, target: int, *, force: bool = False) -> int:
    """Request a number of rollouts, and return the number of the operation."""
    return OperationLog(run.table).request(OperationRequest("scale", target=target, force=force)).id


def plans(victims: tuple[str, ...], together: int) -> list[tuple[Plan, Plan]]:
    """Return pairs of plans, for a scale-out and a scale-in, that kill each process in each state."""
    every = latin(victims, STATES, together)
    return [({s: plan[s] for s in OUT_STATES}, {s: plan[s] for s in IN_STATES}) for plan in every]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("group", TABLE)
def test_every_process_is_killed_in_every_state(make_run: MakeRun, group: str) -> None:
    victims, together = TABLE[group]
    run = make_run("elastic", *ON_POLICY, *ENDLESS, config=AGENTS).start("--simulate-gpus", "4x16GiB")
    wait_for_cell(run, "batch.0", 300)
    address_of(run)
    before, met = holdings(run), Met()
    for out, into in plans(victims, together):
        operation, there = struck(run, lambda: scaled(run, 2), out)
        assert operation.state is State.ACTIVE, operation.reason
        wait_until(lambda: actors_of(run) == ["rollout.0", "rollout.1"], "two rollouts", 180)
        # A rollout that has to leave at once returns its rows.
        force = "rollout.0" in into[State.DRAINING]
        operation, here = struck(run, lambda force=force: scaled(run, 1, force=force), into)
        assert operation.state is State.REMOVED, operation.reason
        wait_for_holdings(run, before)
        met |= there | here
    assert {(victim, State.PENDING) for victim in victims if victim != "rollout.1"} <= met
    assert len({state for _, state in met}) > 1, sorted(met)
    ends_well(run, make_run("calm", *ON_POLICY, config=AGENTS))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_autoscaler_does_not_stop_its_operations(make_run: MakeRun) -> None:
    run = make_run("scaled", *ON_POLICY, *ENDLESS, *SCALED, *COOLDOWNS).start()
    wait_for_cell(run, "batch.0")
    log, victim = OperationLog(run.table), ("autoscaler.0",)

    def requested(after: int) -> int | None:
        """Return the number of an operation of the autoscaler after another operation."""
        of_it = (o.id for o in log.read().operations.values() if o.request.author == "autoscaler.0" and o.id > after)
        return next(of_it, None)

    # One rollout is below the bound, three are above it.
    number = wait_until(lambda: requested(0), "an operation of the autoscaler")
    out, _ = struck(run, lambda: number, dict.fromkeys(OUT_STATES, victim))
    assert out.state is State.ACTIVE, out.reason
    wait_until(lambda: actors_of(run) == ["rollout.0", "rollout.1"], "two rollouts", 180)
    hit(run, "autoscaler.0")
    above = scaled(run, 3)
    assert ended(run, above).state is State.ACTIVE
    number = wait_until(lambda: requested(above), "an operation of the autoscaler")
    into, _ = struck(run, lambda: number, dict.fromkeys(IN_STATES, victim))
    assert into.state is State.REMOVED, into.reason
    wait_until(lambda: actors_of(run) == ["rollout.0", "rollout.1"], "two rollouts", 180)
    ends_well(run, make_run("calm", *ON_POLICY))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("state", [State.CREATING, State.WEIGHT_SYNCING, State.DRAINING])
def test_an_operation_goes_on_after_the_run_resumes(make_run: MakeRun, state: State) -> None:
    more = ["rollout.replicas=2"] if state in IN else []
    run = make_run("resumed", *ON_POLICY, *ENDLESS, *more).start()
    wait_for_cell(run, "batch.0")
    log = OperationLog(run.table)
    number = log.request(OperationRequest("scale", target=1 if state in IN else 2)).id
    wait_until(lambda: has_entered(run, number, state), state, 90)
    kill_root(run)
    run.start()
    wait_until(run.folder.address.exists, "broker.json")
    operation = ended(run, number)
    assert operation.state is (State.REMOVED if state in IN else State.ACTIVE)
    wanted = ["rollout.0"] if state in IN else ["rollout.0", "rollout.1"]
    wait_until(lambda: actors_of(run) == wanted, f"{len(wanted)} rollouts", 60)
    ends_well(run, make_run("calm", *ON_POLICY))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_cancelled_or_late_operation_gives_everything_back(make_run: MakeRun) -> None:
    run = make_run("cancelled", *ON_POLICY, *ENDLESS).start()
    wait_for_cell(run, "batch.0")
    log = OperationLog(run.table)
    number = log.request(OperationRequest("scale", target=3)).id
    wait_until(lambda: has_entered(run, number, State.CREATING), "CREATING", 60)
    assert log.cancel(number, "a test").state is State.CANCELLED
    late = wait_until(lambda: log.request(OperationRequest("scale", target=2, seconds=0.01)).id, "operation")
    failed = ended(run, late)
    assert (failed.state, "after 0.01 s" in failed.reason) == (State.FAILED, True)
    wait_until(lambda: [process(run, f"rollout.{n}") for n in (1, 2)] == [None, None], "end of the new actors", 60)
    wait_until(lambda: actors_of(run) == ["rollout.0"], "one rollout", 60)
    ends_well(run, make_run("calm", *ON_POLICY))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_operation_goes_on_although_the_gateway_that_took_it_is_killed(make_run: MakeRun) -> None:
    run = make_run("gateway", *ON_POLICY, *ENDLESS, config=AGENTS).start()
    wait_for_cell(run, "batch.0")
    url, _ = address_of(run)
    token = (run.folder.root / "gateway" / "operator-token").read_text()
    head = {"Authorization": f"Bearer {token}", "Idempotency-Key": "once"}
    for target, end in ((2, "ACTIVE"), (1, "REMOVED")):
        head["Idempotency-Key"] = f"to-{target}"
        begun = httpx.post(f"{url}/v1/rollouts/scale", json={"target": target}, headers=head, timeout=30).json()
        hit(run, "gateway.0")
        assert ended(run, begun["id"]).state == end
        address_of(run)
        again = httpx.post(f"{url}/v1/rollouts/scale", json={"target": target}, headers=head, timeout=30)
        assert (again.status_code, again.json()["id"]) == (200, begun["id"])
        shown = httpx.get(f"{url}/v1/rollouts", headers=head, timeout=30).json()
        assert shown["total"] == target
    run.end_in_order()
