"""Rollout that dies of a message, as a fault in a tokenizer written in another language would let it die."""

from __future__ import annotations

import os
import signal
from typing import Any

from relax_actors.data.tokenizer import Tokenizer
from relax_actors.roles.agent_rollout import AgentRollout
from relax_actors.sessions.service import GenerationService


class FragileTokenizer(Tokenizer):
    """Ends the process at a message that says `poison`."""

    def chat(self, messages: list[dict[str, Any]], *, asks: bool = True, **variables: Any) -> str:
        if any("poison" in str(message.get("content")) for message in messages):
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().chat(messages, asks=asks, **variables)


class FragileRollout(AgentRollout):
    """Offers samples to agents, and renders their messages with a fragile tokenizer."""

    def start_service(self, service: GenerationService) -> None:
        self._tokenizer = FragileTokenizer(self.context.config.model_path)
        super().start_service(service)
