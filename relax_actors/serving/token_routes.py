"""Bodies of the token-level routes: `/inference/v1/generate` and `/tokenize`, as vLLM and verifiers have them."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from relax_actors.serving.ask import Ask, Lenient, Sampling, stops
from relax_actors.serving.errors import ApiError


class TokenSampling(Lenient):
    """`sampling_params` of `/inference/v1/generate`."""

    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    max_tokens: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    n: int | None = 1
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class GenerateBody(Lenient):
    """Body of `/inference/v1/generate`."""

    token_ids: list[int] = Field(min_length=1)
    sampling_params: TokenSampling = TokenSampling()  # type: ignore[call-arg]
    features: Any = None
    content_parts: Any = None

    def ask(self) -> Ask:
        """Return what the client asks for.

        Raises:
            ApiError: a setting is not supported.
        """
        given = self.sampling_params
        neutral = {
            "n": 1,
            "top_k": -1,
            "min_p": 0,
            "repetition_penalty": 1,
            "presence_penalty": 0,
            "frequency_penalty": 0,
        }
        for name, value in neutral.items():
            if getattr(given, name) not in (None, value, 0 if name == "top_k" else value):
                msg = (
                    f"sampling_params.{name} is not supported: log-probs would no longer be the policy's; leave it out"
                )
                raise ApiError(400, msg, "unsupported_parameter")
        if self.features or self.content_parts:
            raise ApiError(400, "the gateway takes text alone; leave features and content_parts out", "unsupported")
        return Ask(
            prompt=self.token_ids,
            sampling=Sampling(
                max_tokens=given.max_tokens,
                temperature=given.temperature,
                top_p=given.top_p,
                seed=given.seed,
                stop=stops(given.stop),
            ),
        )


class TokenizeBody(Lenient):
    """Body of `/tokenize`: a text, or a conversation."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
