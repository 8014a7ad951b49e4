"""Agents of tests: they talk to the policy with the SDK of OpenAI, over several turns, and branch."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import httpx
import openai

from relax_actors.serving.session_client import AgentResult, AgentTask, TaskEnvironment
from tests.support.tiny_images import png


async def play(task: AgentTask) -> AgentResult:
    """Ask three times in one conversation; reward: the share of sevens in the answers."""
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=10) as client:
        messages = list(task.task["messages"])
        texts = []
        for _ in range(3):
            answer = await client.chat.completions.create(model="policy", messages=messages)
            message = answer.choices[0].message
            texts.append(message.content or "")
            messages += [message.to_dict(), {"role": "user", "content": "again"}]
    whole = "".join(texts)
    return AgentResult(whole.count("7") / max(1, len(whole)), {"characters": float(len(whole))})


async def fail_once(task: AgentTask) -> AgentResult:
    """Play, but fail in the first attempt at each second sample; report whether the row is held out."""
    *_, sample, attempt = task.session.split("-")
    result = await play(task)
    if attempt == "0" and int(sample) % 2 == 0:
        msg = "the agent has lost its way"
        raise RuntimeError(msg)
    return AgentResult(result.reward, {"held_out": float(task.task["held_out"])})


async def fail_always(task: AgentTask) -> AgentResult:
    """Fail before anything is asked."""
    msg = f"no such tool in {task.session}"
    raise RuntimeError(msg)


async def forget_reward(task: AgentTask) -> AgentResult:
    """Play, but report no reward of the first sample of each row."""
    result = await play(task)
    return AgentResult(None if task.session.split("-")[-2] == "0" else result.reward)


async def report_nothing(task: AgentTask) -> None:
    """Play, and report no reward."""
    await play(task)


async def hang(task: AgentTask) -> AgentResult:
    """Play; in the first sample of each row, never come back."""
    result = await play(task)
    if task.session.split("-")[-2] == "0":
        await asyncio.Event().wait()
    return result


async def branch(task: AgentTask) -> float:
    """Ask twice from the same beginning, then go on from the first answer."""
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=10) as client:
        first = list(task.task["messages"])
        answers = [await client.chat.completions.create(model="policy", messages=first) for _ in range(2)]
        more = [*first, answers[0].choices[0].message.to_dict(), {"role": "user", "content": "more"}]
        await client.chat.completions.create(model="policy", messages=more)
    return float("7" in (answers[0].choices[0].message.content or ""))


async def duel(task: AgentTask) -> AgentResult:
    """Let a solver answer twice, and a critic give two judgements of each answer; reward both for their sevens."""
    said: dict[str, list[dict]] = {"solver": list(task.task["messages"]), "critic": []}
    texts: dict[str, str] = {"solver": "", "critic": ""}
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=20) as client:

        async def ask(player: str, n: int) -> None:
            head = {"X-Relax-Player": player}
            answer = await client.chat.completions.create(
                model="policy", messages=said[player], n=n, extra_headers=head
            )
            message = answer.choices[-1].message
            texts[player] += "".join(choice.message.content or "" for choice in answer.choices)
            said[player].append(message.to_dict())

        for _ in range(2):
            await ask("solver", 1)
            said["critic"].append({"role": "user", "content": said["solver"][-1]["content"]})
            await ask("critic", 2)
            said["solver"].append({"role": "user", "content": "again"})
    rewards = {player: text.count("7") / max(1, len(text)) for player, text in texts.items()}
    return AgentResult(rewards=rewards)


async def look(task: AgentTask) -> AgentResult:
    """Show the picture of the task, then one as bytes, then none and the first one again; reward: share of sevens."""
    picture = base64.b64encode(png(len(task.session))).decode()
    shown = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=10) as client:
        messages = list(task.task["messages"]) or [{"role": "user", "content": task.task["prompt"]}]
        texts = []
        for more in ([shown, {"type": "text", "text": "1"}], [{"type": "text", "text": "2"}, shown], "3"):
            count = await counted(task, messages)
            answer = await client.chat.completions.create(model="policy", messages=messages)
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == count, "the count is not that of the prompt"
            message = answer.choices[0].message
            texts.append(message.content or "")
            messages += [message.to_dict(), {"role": "user", "content": more}]
        await client.chat.completions.create(model="policy", messages=messages)
    whole = "".join(texts)
    return AgentResult(whole.count("7") / max(1, len(whole)))


async def counted(task: AgentTask, messages: list[Any]) -> int:
    """Return the tokens of a conversation of a session, by the gateway's count."""
    headers = {"Authorization": f"Bearer {task.api_key}"}
    async with httpx.AsyncClient(timeout=120, transport=httpx.AsyncHTTPTransport(retries=10)) as client:
        while True:
            answer = await client.post(
                f"{task.anthropic_base_url}/tokenize", json={"messages": messages}, headers=headers
            )
            if answer.status_code not in (429, 503, 504):
                answer.raise_for_status()
                return int(answer.json()["count"])


async def act(task: AgentTask) -> AgentResult:
    """Play the run's environment: what the policy says is the action. The rewards are those of the environment."""
    environment = TaskEnvironment(task)
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=10) as client:
        seen, messages = await environment.reset(), list(task.task["messages"])
        while not seen.is_over:
            messages += seen.messages
            answer = await client.chat.completions.create(model="policy", messages=messages)
            message = answer.choices[0].message
            messages.append(message.to_dict())
            seen = await environment.step(message.content or "")
    await environment.close()
    return AgentResult()
