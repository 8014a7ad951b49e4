"""The profile `console` of docker-compose.yml: its link opens the run of the other containers, also after a kill."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.e2e.compose.conftest import Project
from tests.integration.test_monitor import free_port
from tests.support.consoles import log_of
from tests.support.running import wait_until

MESSAGES = 5
"""Messages of the log that are read before the kill, and after it."""
LINK = re.compile(r"console of run demo: http://127\.0\.0\.1:(\d+)/#token=(\S+)")


def link_of(project: Project, links: int) -> tuple[str, str]:
    """Return address and token of the console that printed its link last; it has printed `links`."""

    def printed() -> Any:
        found = LINK.findall(project.compose("logs", "--no-color", "console"))
        return found[-1] if len(found) >= links else None

    port, token = wait_until(printed, f"link {links} of the console", 200)
    return f"http://127.0.0.1:{port}", token


def answered(url: str, token: str) -> dict[str, Any]:
    """Return `/api/run` as soon as the console answers."""

    def run() -> Any:
        try:
            answer = httpx.get(
                f"{url}/api/run", headers={"Authorization": f"Bearer {token}"}, trust_env=False, timeout=60
            )
        except httpx.HTTPError:
            return None
        return answer.json() if answer.status_code == httpx.codes.OK else None

    return dict(wait_until(run, "an answer of the console", 200))


@pytest.mark.timeout(500)
def test_console_shows_the_run_of_the_containers(make_project: Callable[..., Project]) -> None:
    project = make_project("run.steps=2000 eval.rows=16 eval.every=1000")
    project.environment["CONSOLE_PORT"] = str(free_port())
    project.up(profiles=("console",))
    url, token = link_of(project, 1)
    assert url.endswith(f":{project.environment['CONSOLE_PORT']}")
    assert httpx.get(url, trust_env=False, timeout=60).status_code == httpx.codes.OK
    assert httpx.get(f"{url}/api/run", trust_env=False, timeout=60).status_code == httpx.codes.UNAUTHORIZED
    seen = answered(url, token)
    assert (seen["run"], seen["live"]) == ("demo", True)
    with log_of(url, token, 0) as messages:
        first = [next(messages)[0] for _ in range(MESSAGES)]
    project.kill("console")
    url, again = link_of(project, 2)
    assert again != token, "a socket that is bound anew has new tokens"
    assert answered(url, again)["step"] >= seen["step"]
    with log_of(url, again, first[-1]) as messages:
        rest = [next(messages)[0] for _ in range(MESSAGES)]
    assert [*first, *rest] == list(range(1, 2 * MESSAGES + 1))
