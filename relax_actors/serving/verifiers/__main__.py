"""Command line of the worker for environments of verifiers."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import httpx

from relax_actors.serving.agent_worker import AgentStuckError, AgentWorker
from relax_actors.serving.session_client import AgentResult, AgentTask, SessionClient, SessionGoneError
from relax_actors.serving.verifiers.example import VerifiersEnvironment, VerifiersError, example_of
from relax_actors.serving.verifiers.legacy import LegacyEnvironment
from relax_actors.serving.verifiers.tasksets import TasksetEnvironment

LEASE_SECONDS = 60.0
SHOWN = 1000
"""Characters of an error."""


def _options(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        msg = f"no JSON object: {text!r}"
        raise argparse.ArgumentTypeError(msg)
    return options


def _load(given: argparse.Namespace) -> VerifiersEnvironment:
    try:
        if given.environment:
            return LegacyEnvironment(given.environment, given.args)
        return TasksetEnvironment(given.taskset, given.args)
    except (ImportError, ValueError, RuntimeError) as error:
        cause = f" ({error.__cause__})" if error.__cause__ else ""
        msg = f"cannot load {given.environment or given.taskset!r}: {error}{cause}"
        raise VerifiersError(msg) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m relax_actors.serving.verifiers",
        description="Run an environment of verifiers as the agent of a run, or write the rows of its data set.",
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--environment", metavar="NAME", help="environment of verifiers 0.3 (vf.load_environment)")
    which.add_argument("--taskset", metavar="ID", help="taskset of verifiers.v1")
    parser.add_argument("--args", type=_options, default={}, metavar="JSON", help="arguments, or fields of the config")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="write the data set for data.path, then exit")
    parser.add_argument("--split", choices=("train", "eval"), default="train", help="data set of --rows")
    parser.add_argument("--limit", type=int, metavar="N", help="rows of --rows at most")
    parser.add_argument("--url", help="address of the gateway")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="file with the token of the gateway")
    parser.add_argument("--concurrency", type=int, default=16, metavar="N", help="samples at once")
    parser.add_argument("--patience", type=float, default=600.0, metavar="SECONDS", help="exit after so long idle")
    return parser


def _write(environment: VerifiersEnvironment, path: Path, split: str, limit: int | None) -> int:
    number, examples = 0, environment.examples(split)
    with path.open("w", encoding="utf-8") as file:
        for index, example in enumerate(itertools.islice(examples, limit)):
            file.write(json.dumps(example.row(index, split), default=str) + "\n")
            number += 1
    return number


async def _work(environment: VerifiersEnvironment, given: argparse.Namespace) -> str:
    """Work, and return why the worker stopped if it is an error."""
    client = SessionClient(given.url, given.token_file.read_text().split()[0])
    why = ""

    async def agent(task: AgentTask) -> AgentResult:
        return await environment.run(example_of(environment, task), task)

    def on_failure(task: AgentTask, error: str) -> None:
        sys.stderr.write(f"{task.session}: {error[:SHOWN]}\n")

    worker = AgentWorker(client, agent, given.concurrency, LEASE_SECONDS, on_failure)
    try:
        await worker.run(given.patience)
    except AgentStuckError as error:
        why = str(error)
    except SessionGoneError as error:
        why = f"the gateway refuses to give out samples: {error}"
    except httpx.TransportError as error:
        why = f"the gateway {given.url} does not answer: {error}"
    finally:
        await environment.close()
        await client.close()
    sys.stdout.write(f"{worker.done} samples, {worker.failed} failed\n")
    return why


def main() -> int:
    """Write rows or work; return the exit status."""
    parser = _parser()
    given = parser.parse_args()
    if given.rows is None and not (given.url and given.token_file):
        parser.error("give --url and --token-file of the run's gateway, or --rows to write its data set")
    try:
        environment = _load(given)
        if given.rows is not None:
            number = _write(environment, given.rows, given.split, given.limit)
            sys.stdout.write(f"{number} rows in {given.rows}\n")
            return 0
        why = asyncio.run(_work(environment, given))
    except VerifiersError as error:
        why = str(error)
    if why:
        sys.stderr.write(f"{why}\n")
    return int(bool(why))


if __name__ == "__main__":
    sys.exit(main())
