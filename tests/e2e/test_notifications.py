"""A real run tells a real webhook what happens to it: each message once, also when its notifier is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from tests.support.hooks import Hook, hooked
from tests.support.running import Run, processes_of, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def hook() -> Iterator[Hook]:
    with hooked() as found:
        yield found


def notifiers(run: Run) -> list[int]:
    return processes_of(run.folder.root, "\0notify\0")


def test_killed_notifier_repeats_nothing_and_the_run_does_not_notice(make_run: Callable[..., Run], hook: Hook) -> None:
    settings = ['notify.on=["started", "finished", "findings"]', f"notify.webhook={hook.url}", "notify.every=1"]
    run = make_run("told", *settings, "reward.function=tiny_tasks.never_parsed", "run.steps=300").start()
    wait_until(lambda: hook.of("findings"), "message about the flat reward", 120)
    (notifier,) = notifiers(run)
    os.kill(notifier, signal.SIGKILL)
    wait_until(lambda: [pid for pid in notifiers(run) if pid != notifier], "new notifier")
    code, result, said = run.finish()
    assert code == 0, said
    assert (result["trained"], result["restarts"]) == (1200, 0)
    assert [message["title"] for message in hook.of("started")] == ["relax run told is up"]
    assert [message["title"] for message in hook.of("finished")] == ["relax run told is finished"]
    lines = [line for message in hook.of("findings") for line in message["text"].splitlines()]
    assert sum("the mean reward is 0 in all" in line for line in lines) == 1
    logs = [path.read_text() for path in run.folder.log("notify").parent.iterdir()]
    assert len(logs) > 1
    assert not any("secret-token" in log for log in logs)


def test_killed_run_is_reported_and_resumes_and_its_end_is_told_once(make_run: Callable[..., Run], hook: Hook) -> None:
    settings = [
        'notify.on=["started", "finished", "gave_up"]',
        f"notify.webhook={hook.url}",
        "notify.every=1",
        "run.steps=60",
    ]
    run = make_run("lost", *settings).start()
    wait_until(lambda: hook.of("started"), "message about the start", 120)
    assert run.process is not None
    run.process.kill()
    run.process.communicate()
    wait_until(lambda: not notifiers(run), "end of the notifier")
    assert [message["title"] for message in hook.of("gave_up")] == ["relax run lost has lost its `relax up`"]
    code, _, said = run.start().finish()
    assert code == 0, said
    assert [message["title"] for message in hook.of("finished")] == ["relax run lost is finished"]
    assert (len(hook.of("started")), len(hook.of("gave_up"))) == (2, 1)
