"""An agent that owns its loop: it sorts three digits by turns, and knows the model only as an OpenAI endpoint."""

from __future__ import annotations

import random

import openai

from relax_actors import AgentResult, AgentTask, Task

DIGITS = 3


async def solve(task: AgentTask) -> AgentResult:
    """Show the digits that are left, take the model's pick, and go on without the smallest one."""
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=10) as client:
        messages = list(task.task["messages"])
        left, right = list(messages[0]["content"]), 0
        while left:
            answer = await client.chat.completions.create(model="policy", messages=messages)
            pick, smallest = answer.choices[0].message.content, min(left)
            right += pick == smallest
            left.remove(smallest)
            messages += [{"role": "assistant", "content": pick}, {"role": "user", "content": "".join(left)}]
    return AgentResult(right / DIGITS, {"all_right": float(right == DIGITS)})


def make(*, size: int | None, seed: int) -> list[Task]:
    """Return tasks; the answer is an episode of random picks, which shows the format and not the task."""
    source = random.Random(seed)  # noqa: S311 not a secret
    return [_task(source) for _ in range(size or 10_000)]


def _task(source: random.Random) -> Task:
    left = source.choices("0123456789", k=DIGITS)
    prompt, answer = "".join(left), ""
    while left:
        answer += source.choice(left)
        left.remove(min(left))
        answer += "." + "".join(left) + ":" if left else ""
    return Task([{"role": "user", "content": prompt}], answer)
