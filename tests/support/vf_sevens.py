"""Environment of the package verifiers: two turns, whose reward is the share of sevens in the answers."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset


class Sevens(vf.MultiTurnEnv):
    """Says "again" behind the first answer."""

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        return [vf.UserMessage(content="again")]


def share(completion: Any, **kwargs: Any) -> float:
    texts = [m["content"] if isinstance(m, dict) else m.content for m in completion]
    whole = "".join(str(text or "") for text in texts)
    return whole.count("7") / max(1, len(whole))


def load_environment(**kwargs: Any) -> vf.Environment:
    rows = [{"prompt": [{"role": "user", "content": f"say {i % 10}"}], "answer": str(i % 10)} for i in range(100)]
    return Sevens(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[share]), max_turns=2)
