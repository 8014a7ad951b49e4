"""Bodies of the token-level routes: `/inference/v1/generate` and `/tokenize`, as vLLM and verifiers have them."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from relax_actors.serving.ask import Ask, Lenient, SamplingFields
from relax_actors.serving.errors import ApiError


class TokenSampling(SamplingFields):
    """`sampling_params` of `/inference/v1/generate`."""

    place: ClassVar[str] = "sampling_params."

    n: int | None = Field(1, ge=1, le=1)


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
        if self.features or self.content_parts:
            raise ApiError(
                400,
                "this route takes tokens alone; send images, sound and video to /v1/chat/completions",
                "unsupported",
            )
        return Ask(prompt=self.token_ids, sampling=given.sampling(given.max_tokens))


class TokenizeBody(Lenient):
    """Body of `/tokenize`: a text, or a conversation."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
