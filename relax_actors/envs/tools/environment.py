"""Environment in which a model calls tools until it answers without a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from relax_actors.data.tool_call import ParsedAnswer, ToolCall, ToolFormat, call_ids
from relax_actors.data.tool_calls import parse_answer
from relax_actors.envs.environment import Environment, Result, Step
from relax_actors.envs.tools.functions import Tool, ToolError, content_of, tools_of, utf8

MAX_TEXT = 16_000


class ToolEnvironment(Environment):
    """Runs the tool calls of answers; an answer without a call ends the episode.

        class Shop(ToolEnvironment):
            tools = (find_article,)          # a function with type hints and a docstring

            def score(self, answer):
                return float(answer == self.task["answer"])

    A malformed call, an unknown tool, wrong arguments and a tool that raises, exits or returns something
    without a text are answered to the model with the reason.

    Attributes:
        tools: functions that the model may call. Override `make_tools` for tools with a state.
        tool_format: how the model writes calls: "hermes", "qwen_xml", "llama_json" or "mistral".
        result_role: role of the messages with results.
        max_result_chars: longest result; a longer one loses its middle.
        task: the task of the episode, from `reset` on.
    """

    tools: ClassVar[Sequence[Callable[..., Any] | Tool]] = ()
    tool_format: ToolFormat = ToolFormat.HERMES
    result_role: str = "tool"
    max_result_chars: int = MAX_TEXT

    _by_name: dict[str, Tool]
    _task: Mapping[str, Any]
    _turns: int = 0

    @property
    def task(self) -> Mapping[str, Any]:
        """The task of the episode."""
        return self._task

    @classmethod
    def tool_schemas(cls, options: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the JSON schemas of the tools."""
        del options
        return [tool.schema for tool in tools_of(cls.tools).values()]

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Check that the tools have schemas; raises ConfigError without type hints."""
        cls.tool_schemas(options)

    def make_tools(self) -> Sequence[Callable[..., Any] | Tool]:
        """Return the tools of an episode for `reset`, with the schemas of `tool_schemas`."""
        return self.tools

    def reset(self, task: Mapping[str, Any], rng: np.random.Generator) -> Any:
        """Begin with the data's prompt."""
        del rng
        self._task, self._turns = task, 0
        self._by_name = tools_of(self.make_tools())
        return ""

    async def step(self, action: str) -> Result:
        """Run the calls of an answer."""
        self._turns += 1
        schemas = [tool.schema for tool in self._by_name.values()]
        answer = parse_answer(action, self.tool_format, schemas)
        if not answer.calls and not answer.malformed:
            return self.finish(answer)
        messages: list[dict[str, Any]] = []
        failed = len(answer.malformed)
        for name, call in zip(call_ids(answer.calls, f"{self._turns} {action}"), answer.calls, strict=True):
            try:
                content = self._shortened(content_of(await self._call(call)))
            except ToolError as error:
                content, failed = self._shortened(utf8(f"Error: {error}")), failed + 1
            messages.append(
                {"role": self.result_role, "tool_call_id": name, "name": utf8(call.name), "content": content}
            )
        # Mistral's templates take results of calls alone from a tool.
        role = "user" if self.tool_format is ToolFormat.MISTRAL and not answer.calls else self.result_role
        unknown = call_ids([ToolCall("")] * len(answer.malformed), f"malformed {self._turns} {action}")
        for name, bad in zip(unknown, answer.malformed, strict=True):
            messages.append({"role": role, "tool_call_id": name, "content": utf8(f"Error: {bad.error}")})
        return Step(messages, metrics={"tool_calls": len(answer.calls), "tool_errors": failed})

    def finish(self, answer: ParsedAnswer) -> Step:
        """Return the end of the episode, with the reward of an answer without calls."""
        return Step(reward=self.score(answer.content), done=True)

    def score(self, answer: str) -> float | None:
        """Return the reward of the final answer; None, the default, leaves it to `reward.function`."""
        del answer
        return None

    async def _call(self, call: ToolCall) -> Any:
        tool = self._by_name.get(call.name)
        if tool is None:
            msg = f"there is no tool {call.name!r:.80}; tools are {', '.join(self._by_name) or 'none'}"
            raise ToolError(msg)
        return await tool.call(call.arguments)

    def _shortened(self, content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
        if isinstance(content, list) or len(content) <= self.max_result_chars:
            return content
        half, left_out = self.max_result_chars // 2, len(content) - 2 * (self.max_result_chars // 2)
        return f"{content[:half]}\n[... {left_out} characters left out ...]\n{content[-half:]}"
