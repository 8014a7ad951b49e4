"""Environments of verifiers 0.3 and before: `vf.load_environment`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from relax_actors.serving.session_client import AgentResult, AgentTask
from relax_actors.serving.verifiers.example import Example, VerifiersError

RETRIES = 10
"""Attempts of a request while the gateway restarts."""
EMPTY = "EmptyModelResponseError"
"""Error of verifiers for an answer without text. The model is to blame, so the sample is trained with reward 0."""


class LegacyEnvironment:
    """A `vf.Environment`; raises VerifiersError if the installed verifiers has none."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        import verifiers  # noqa: PLC0415 absent where the run is

        if not hasattr(verifiers, "load_environment"):
            msg = (
                f"verifiers {verifiers.__version__} has no load_environment; install 'verifiers<0.4' and "
                "'renderers==0.1.10', or name a taskset with --taskset"
            )
            raise VerifiersError(msg)
        self._environment = verifiers.load_environment(name, **options)
        self._splits: dict[str, Any] = {}

    def _split(self, split: str) -> Any:
        if split not in self._splits:
            whole = self._environment
            self._splits[split] = whole.get_eval_dataset() if split == "eval" else whole.get_dataset()
        return self._splits[split]

    def examples(self, split: str) -> Iterator[Example]:
        """Yield the examples of `get_dataset()`, or of `get_eval_dataset()` if `split` is "eval"."""
        return (_example(row) for row in self._split(split))

    def example(self, split: str, index: int) -> Example | None:
        """Return a row of a data set, None if it has fewer."""
        data = self._split(split)
        return _example(data[index]) if index < len(data) else None

    async def run(self, example: Example, task: AgentTask) -> AgentResult:
        """Run and score a rollout with the session as its client; raises VerifiersError."""
        from openai import AsyncOpenAI  # noqa: PLC0415
        from verifiers.clients import OpenAIChatCompletionsClient  # noqa: PLC0415

        async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=RETRIES) as native:
            client = OpenAIChatCompletionsClient(native)
            done = await self._environment.run_rollout(example.value, client, "policy", {})
        if (error := done.get("error")) is not None:
            if error["error"] == EMPTY:
                return AgentResult(0.0, {"empty_answer": 1.0})
            msg = f"{error['error']}: {error['message']}"
            raise VerifiersError(msg)
        return AgentResult(float(done["reward"]), {name: float(value) for name, value in done["metrics"].items()})

    async def close(self) -> None:
        """Nothing is held."""


def _example(row: dict[str, Any]) -> Example:
    return Example(dict(row), row["prompt"], str(row.get("answer") or ""))
