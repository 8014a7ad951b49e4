"""A start that makes progress may take longer than its deadline; one that hangs may not."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from relax_actors.config.infrastructure import START_LIMIT
from relax_actors.isolation.proc import processes
from relax_actors.supervision.launch import Launch
from relax_actors.supervision.processes import ProcessTree
from relax_actors.supervision.spec import Backoff, ChildSpec, Limits
from relax_actors.supervision.start_progress import LOADED_BYTES, StartProgress, Usage, usage_of
from relax_actors.supervision.supervisor import Supervisor
from tests.support.messages import assert_says
from tests.support.process_trees import HEAD, READY, Recorder, RunTree, TreeThread, python
from tests.support.running import wait_until
from tests.support.supervisors import CRASH, supervisor

DEADLINE = 180.0
IDLE = Usage(10.0, 1 << 30, 5000)


def ended_at(usages: dict[float, Usage], *, deadline: float = DEADLINE, resumed: float = 0.0) -> float | None:
    """When a start that uses this much from then on is ended."""
    progress, usage = StartProgress(deadline), IDLE
    for now in map(float, range(2000)):
        usage = usages.get(now, usage)
        if progress.is_due(0.0, now):
            progress.observe(usage, now)
        if progress.lateness(0.0, resumed, now):
            return now
    return None


def test_start_without_progress_is_ended_at_its_deadline() -> None:
    assert ended_at({}) == DEADLINE + 1


@pytest.mark.parametrize(
    "grown",
    [Usage(13.0, 1 << 30, 5000), Usage(10.0, (1 << 30) + LOADED_BYTES, 5000), Usage(10.0, 1 << 30, 5001)],
    ids=["cpu", "memory", "log"],
)
def test_progress_of_any_kind_delays_the_end(grown: Usage) -> None:
    ended = ended_at({170.0: grown})
    assert ended is not None
    assert 230 <= ended <= 246


def test_processes_that_only_poll_make_no_progress() -> None:
    polling = {float(now): Usage(10.0 + 0.02 * now, (1 << 30) + now, 5000) for now in range(2000)}
    assert ended_at(polling) == DEADLINE + 1


def test_start_that_computes_for_ever_is_ended() -> None:
    busy = {float(now): Usage(10.0 + 0.2 * now, 1 << 30, 5000) for now in range(2000)}
    assert ended_at(busy) == START_LIMIT * DEADLINE + 1


def test_pause_of_the_machine_is_no_lack_of_progress() -> None:
    assert ended_at({}, resumed=170.0) == 230.0


def test_start_that_waited_for_another_one_has_its_whole_time_afterwards() -> None:
    progress, waited = StartProgress(DEADLINE), 10 * START_LIMIT * DEADLINE
    progress.observe(IDLE, 170.0)
    progress.hold(waited)
    assert not progress.is_due(0.0, waited + 1)
    assert progress.lateness(0.0, 0.0, waited + DEADLINE) == ""
    assert progress.lateness(0.0, 0.0, waited + DEADLINE + 1).startswith("not ready within 181 s")


def test_reason_names_the_time_and_the_remedy() -> None:
    progress = StartProgress(DEADLINE)
    progress.observe(IDLE, 130.0)
    reason = progress.lateness(0.0, 0.0, 200.0)
    for word in (
        "not ready within 200 s",
        "no progress for 70 s",
        "log",
        "memory",
        "CPU",
        "supervision.start_deadline",
    ):
        assert word in reason


def test_window_of_failed_starts_is_told_as_it_was() -> None:
    made = supervisor("server.0", intensity=5)
    made.start(0.0)
    now = 0.0
    while made.gave_up is None:
        now += 181.0
        made.exited("server.0", CRASH, now)
        made.tick(made.next_due() or now)
    assert_says(made.gave_up.reason, "6 failures in 905 s", "5 in 60 s")
    assert "supervision.intensity, supervision.period" in made.gave_up.reason


COMPUTES = HEAD + "import time\nend = time.monotonic() + 4\nwhile time.monotonic() < end: pass\n"


FORKS = HEAD + (
    "import time\n"
    "if not os.fork():\n    os.setsid()\n    end = time.monotonic() + 4\n"
    "    while time.monotonic() < end: pass\n    os._exit(0)\n"
    "os.wait()\nsay(ready=True)\nsignal.pause()\n"
)
LOGS = HEAD + (
    "for _ in range(40):\n    signal.sigtimedwait([], 0.1)\n    print('loading', flush=True)\n"
    "say(ready=True)\nsignal.pause()\n"
)


def test_children_that_make_progress_become_ready_past_their_deadline(run: RunTree) -> None:
    """They compute, wait for a descendant in a session of its own that computes, or write to their log."""
    scripts = {"computes": COMPUTES + "say(ready=True)\nsignal.pause()\n", "forks": FORKS, "logs": LOGS}
    running = run(scripts, start_deadline=3.0)
    wait_until(lambda: {seen.child for seen in running.recorder.all if seen.what == "ready"} == {*scripts}, "children")
    assert sorted(seen.what for seen in running.recorder.all) == ["ready"] * 3 + ["started"] * 3


def test_child_that_waits_for_another_one_may_start_as_long_as_that_one(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    server = COMPUTES + f"open({str(ready)!r}, 'w').close()\nsay(ready=True)\nsignal.pause()\n"
    client = (
        HEAD
        + f"while not os.path.exists({str(ready)!r}):\n    signal.sigtimedwait([], 0.1)\n"
        + READY
        + "signal.pause()"
    )
    scripts = {"server.0": server, "rollout.0": client}
    limits, backoff = Limits(1, 60), Backoff(0.1, 1)
    specs = {name: [ChildSpec(name, start_deadline=3.0)] for name in scripts}
    pools = {name: Supervisor(children, limits, backoff, random.Random(1)) for name, children in specs.items()}

    def launch(child: str) -> Launch:
        awaits = "server.0" if child == "rollout.0" else ""
        return Launch(python(scripts[child]), tmp_path / child, awaits=awaits)

    recorder = Recorder()
    running = TreeThread(ProcessTree(pools, launch, recorder, 60.0), recorder)
    try:
        running.until("ready", "rollout.0")
        assert "ended" not in [seen.what for seen in recorder.all]
    finally:
        running.stop()


def test_usage_of_this_process_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("12345")
    before = usage_of(os.getpid(), log, processes())
    end = time.thread_time() + 0.2
    while time.thread_time() < end:
        pass
    after = usage_of(os.getpid(), log, processes())
    assert after.cpu >= before.cpu + 0.1
    assert after.memory > 1 << 20
    assert after.log == 5
