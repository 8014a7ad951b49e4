"""Bodies of the token-level routes: `/inference/v1/generate` and `/tokenize`, as vLLM and verifiers have them."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from relax_actors.serving.ask import Ask, Lenient, Sampling, StopIds, Undistorted, stops
from relax_actors.serving.errors import ApiError


class TokenSampling(Undistorted):
    """`sampling_params` of `/inference/v1/generate`."""

    place: ClassVar[str] = "sampling_params."

    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    max_tokens: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    stop_token_ids: StopIds | None = None
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
        return Ask(
            prompt=self.token_ids,
            sampling=Sampling(
                max_tokens=given.max_tokens,
                temperature=given.temperature,
                top_p=given.top_p,
                seed=given.seed,
                stop=stops(given.stop),
                stop_ids=tuple(given.stop_token_ids or ()),
            ),
        )


class TokenizeBody(Lenient):
    """Body of `/tokenize`: a text, or a conversation."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
