"""Runs environments of the package verifiers (0.3, `vf.Environment`) as agents of a run.

    pip install 'verifiers==0.3.1' 'renderers==0.1.10' httpx
    python verifiers_worker.py my_environment --url http://127.0.0.1:8765 --token-file runs/demo/gateway/token

The file imports nothing of this package, so that it runs where verifiers is installed. The run has a section [agent]
without `command`; the metadata of its rows have a field `index`, the number of the example in the environment's data
set. Model calls go to the session of the sample, which keeps the tokens; the rubric's reward ends it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import verifiers
from openai import AsyncOpenAI
from verifiers.clients import OpenAIChatCompletionsClient

PAUSE_SECONDS = 0.5
LEASE_SECONDS = 60.0
GIVE_UP_SECONDS = 300.0


class Worker:
    """Takes samples and runs the environment for each.

    Args:
        environment: a `vf.Environment`.
        url: address of the gateway.
        token: its token.
        concurrency: samples at once.
    """

    def __init__(self, environment: Any, url: str, token: str, concurrency: int) -> None:
        self._environment, self._url, self._token = environment, url.rstrip("/"), token
        self._slots = asyncio.Semaphore(concurrency)
        self._http = httpx.AsyncClient(timeout=60.0, trust_env=False)
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, until: float) -> int:
        """Work until no sample has come for `until` seconds; return the number of samples."""
        done, last = 0, time.monotonic()
        while time.monotonic() - last < until:
            await self._slots.acquire()
            session = await self._post("/sessions", self._token, {"lease_seconds": LEASE_SECONDS})
            if session is None:
                self._slots.release()
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            done, last = done + 1, time.monotonic()
            task = asyncio.ensure_future(self._work(session))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        await asyncio.gather(*self._tasks)
        return done

    async def _work(self, session: dict[str, Any]) -> None:
        keeping = asyncio.ensure_future(self._keep(session))
        try:
            body = await self._sample(session)
        except Exception as error:  # noqa: BLE001 of this sample alone
            body = {"error": f"{type(error).__name__}: {error}"[:4000]}
        finally:
            keeping.cancel()
            self._slots.release()
        await self._post(f"/sessions/{session['id']}/end", session["token"], body)

    async def _sample(self, session: dict[str, Any]) -> dict[str, Any]:
        """Return the reward and metrics of an episode."""
        data = self._environment.get_dataset()
        example = dict(data[int(session["task"]["metadata"]["index"]) % len(data)])
        native = AsyncOpenAI(base_url=session["base_url"], api_key=session["token"], max_retries=10)
        client = OpenAIChatCompletionsClient(native)
        state = await self._environment.rollout(example, client, "policy", {})
        await self._environment.rubric.score_rollout(state)
        if (error := state.get("error")) is not None:
            return {"error": str(error)[:4000]}
        metrics = {name: float(value) for name, value in (state.get("metrics") or {}).items()}
        return {"reward": float(state["reward"]), "metrics": metrics}

    async def _keep(self, session: dict[str, Any]) -> None:
        while True:
            await asyncio.sleep(LEASE_SECONDS / 4)
            await self._post(f"/sessions/{session['id']}/keep", session["token"], {})

    async def _post(self, path: str, token: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """Send a request, again while the gateway restarts; None if there is nothing, or the session is over."""
        end = time.monotonic() + GIVE_UP_SECONDS
        while True:
            try:
                head = {"Authorization": f"Bearer {token}"}
                answer = await self._http.post(f"{self._url}{path}", json=body, headers=head)
            except httpx.TransportError:
                if time.monotonic() > end:
                    raise
            else:
                if answer.status_code < 500 and answer.status_code != 429:
                    return dict(answer.json()) if answer.status_code == 200 else None
                if time.monotonic() > end:
                    return None
            await asyncio.sleep(PAUSE_SECONDS)


def main() -> None:
    """Run the worker."""
    parser = argparse.ArgumentParser(description="Run a verifiers environment as the agent of a run.")
    parser.add_argument("environment", help="name of the environment, as vf.load_environment takes it")
    parser.add_argument("--url", required=True, help="address of the gateway")
    parser.add_argument("--token-file", required=True, type=Path, help="file with the gateway's token")
    parser.add_argument("--options", type=json.loads, default={}, help="arguments of the environment, as JSON")
    parser.add_argument("--concurrency", type=int, default=16, help="samples at once")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds without a sample after which it ends")
    given = parser.parse_args()
    environment = verifiers.load_environment(given.environment, **given.options)
    worker = Worker(environment, given.url, given.token_file.read_text().split()[0], given.concurrency)
    done = asyncio.run(worker.run(given.patience))
    sys.stdout.write(f"{done} samples\n")


if __name__ == "__main__":
    main()
