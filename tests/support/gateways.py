"""Gateway of a run of `relax up`."""

from __future__ import annotations

import httpx

from tests.support.running import SUPPORT, Run, wait_until

AGENTS = SUPPORT / "tiny_agents.toml"


def address_of(run: Run) -> tuple[str, str]:
    """URL and token of a run's gateway, as soon as it answers."""
    folder = run.folder.root / "gateway"

    def found() -> str:
        try:
            url = (folder / "url.0").read_text()
            return url if httpx.get(f"{url}/health", timeout=2).status_code == 200 else ""
        except (OSError, httpx.HTTPError):
            return ""

    return wait_until(found, "gateway", 300), (folder / "token").read_text()
