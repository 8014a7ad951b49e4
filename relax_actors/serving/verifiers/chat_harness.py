"""Harness of `verifiers.v1` that asks the model in this process, where the one of verifiers starts a program a turn."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

HARNESS = "relax_chat"
"""Its id. verifiers imports a module of this name."""
RETRIES = 10


def register() -> None:
    """Let verifiers find the harness."""
    if HARNESS not in sys.modules:
        module = ModuleType(HARNESS)
        module.__dict__.update(ChatHarness=_harness_class(), __all__=["ChatHarness"])
        sys.modules[HARNESS] = module


def _harness_class() -> type:
    import verifiers.v1 as vf  # noqa: PLC0415 absent where the run is
    from openai import AsyncOpenAI  # noqa: PLC0415
    from verifiers.v1.dialects.chat import message_to_wire  # noqa: PLC0415

    class ChatHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
        """Sends the conversation, and yields at the answer. Tools belong to other harnesses."""

        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_RESUME = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
        ) -> Any:
            system, prompt = self.resolve_prompt(data)
            messages: Any = [{"role": "system", "content": system}] if system else []
            if isinstance(prompt, str):
                messages.append({"role": "user", "content": prompt})
            else:
                messages += [message_to_wire(message) for message in prompt or ()]
            async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=RETRIES) as client:
                await client.chat.completions.create(model=ctx.model, messages=messages)
            return vf.ProgramResult(0, "", "")

    return ChatHarness
