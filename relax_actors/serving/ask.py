"""Requests of clients in every protocol, and the bodies of OpenAI's completion requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Field, model_validator

from relax_actors.data.answer_form import Form
from relax_actors.messages.generate import MAX_CHOICES, MAX_STOPS
from relax_actors.serving.errors import ApiError
from relax_actors.serving.forms import offered_tools, schema_of

Body = TypeVar("Body", bound=BaseModel)
StopIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=MAX_STOPS)]
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "ebnf": (),
    "frequency_penalty": (0,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "ignore_eos": (False,),
    "json_schema": (),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "min_p": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "regex": (),
    "repetition_penalty": (1,),
    "structured_outputs": (),
    "top_k": (-1, 0),
    "typical_p": (1,),
    "use_beam_search": (False,),
}
"""Settings of other servers that change the distribution of the answer, with the values that do not."""
_REPLACED = {"functions": "tools", "function_call": "tool_choice"}
"""Fields that OpenAI has replaced, with their successors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to sample; None for the settings of the run."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A conversation to continue, or a prompt as text or tokens.

    Attributes:
        one_call: whether an answer ends behind its first tool call.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    form: Form = field(default_factory=Form)
    settings: dict[str, Any] = field(default_factory=dict)
    prompt: str | list[int] | None = None
    sampling: Sampling = Sampling()
    n: int = 1
    one_call: bool = False
    stream: bool = False
    usage_in_stream: bool = False
    logprobs: bool = False
    token_ids: bool = False
    model: str = ""


class Lenient(BaseModel):
    """Body of a request; fields that change nothing here are ignored."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, protected_namespaces=())


class Undistorted(Lenient):
    """Body without settings that change the distribution of the policy's answers.

    Attributes:
        place: where the fields are in the body, for errors.
    """

    place: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, body: Any) -> Any:
        for name, value in body.items() if isinstance(body, dict) else ():
            if value is None:
                continue
            if name in _NEUTRAL and value not in _NEUTRAL[name]:
                why = "log-probs would no longer be those of the policy"
                raise ApiError(400, f"{cls.place}{name} is not supported: {why}; leave it out", "unsupported_parameter")
            if name in _REPLACED and value:
                msg = f"{cls.place}{name} is not supported; send {_REPLACED[name]} in its place"
                raise ApiError(400, msg, "unsupported_parameter")
        return body


class SamplingFields(Undistorted):
    """Fields that control sampling, in the words of OpenAI and vLLM."""

    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    max_tokens: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    stop_token_ids: StopIds | None = None

    def sampling(self, max_tokens: int | None) -> Sampling:
        """Return the sampling settings; raises ApiError for empty or too many stop strings."""
        return Sampling(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            stop=stops(self.stop),
            stop_ids=tuple(self.stop_token_ids or ()),
        )


class SamplingBody(SamplingFields):
    """Body of OpenAI's completions."""

    model: str = Field("", max_length=256)
    n: int | None = Field(1, ge=1, le=MAX_CHOICES)
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool | None = False

    @property
    def usage_in_stream(self) -> bool:
        """Whether the last chunk of a stream has the usage."""
        return bool((self.stream_options or {}).get("include_usage"))


class ChatBody(SamplingBody):
    """Body of `/v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(default_factory=list)
    tokens: list[int] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def ask(self) -> Ask:
        """Return what the client asks for; raises ApiError if a setting is not supported."""
        if self.top_logprobs:
            msg = "top_logprobs is not supported: the engine records the sampled token's log-prob alone; leave it out"
            raise ApiError(400, msg, "unsupported_parameter")
        schema = schema_of(self.response_format, "response_format")
        once = self.parallel_tool_calls is False
        tools, form = offered_tools(self.tools or [], self.tool_choice, once=once, schema=schema)
        return Ask(
            messages=self.messages,
            tools=tools,
            form=form,
            settings=self.chat_template_kwargs or {},
            prompt=self.tokens,
            sampling=self.sampling(self.max_completion_tokens or self.max_tokens),
            n=self.n or 1,
            one_call=once,
            stream=bool(self.stream),
            usage_in_stream=self.usage_in_stream,
            logprobs=bool(self.logprobs),
            token_ids=bool(self.return_token_ids),
            model=self.model,
        )


class CompletionBody(SamplingBody):
    """Body of `/v1/completions`."""

    prompt: str | list[int] | list[str] | list[list[int]] = ""
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: bool | None = False
    suffix: str | None = None

    def ask(self) -> Ask:
        """Return what the client asks for.

        Raises:
            ApiError: a setting is not supported, or several prompts were given.
        """
        if self.echo or self.suffix:
            msg = "echo and suffix are not supported; leave them out"
            raise ApiError(400, msg, "unsupported_parameter")
        prompt: Any = self.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) != 1:
                msg = f"{len(prompt)} prompts in one request; send one request for each"
                raise ApiError(400, msg, "unsupported_parameter")
            prompt = prompt[0]
        return Ask(
            prompt=prompt,
            sampling=self.sampling(self.max_tokens),
            n=self.n or 1,
            stream=bool(self.stream),
            usage_in_stream=self.usage_in_stream,
            logprobs=self.logprobs is not None,
            token_ids=bool(self.return_token_ids),
            model=self.model,
        )


def stops(given: str | list[str] | None) -> tuple[str, ...]:
    """Return stop strings as a tuple; raises ApiError if there are too many, or an empty one."""
    strings = (given,) if isinstance(given, str) else tuple(given or ())
    if len(strings) > MAX_STOPS or any(not 0 < len(text) <= 256 for text in strings):  # noqa: PLR2004
        msg = f"stop must be at most {MAX_STOPS} strings of 1 to 256 characters"
        raise ApiError(400, msg, "invalid_request")
    return strings


def check_messages(messages: Any, name: str = "messages") -> None:
    """Check that a conversation is not empty; raises ApiError if it is."""
    if not messages:
        raise ApiError(400, f"{name} is empty; send at least one message", "invalid_request")


def validated(model: type[Body], body: Any) -> Body:
    """Check the body of a request; raises ApiError if the body does not fit the model."""
    try:
        return model.model_validate(body)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))[:200] or "body"
        msg = f"{where}: {first['msg'].removeprefix('Value error, ')}; correct the body of the request"
        raise ApiError(400, msg, "invalid_request") from error


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
        """Return what the client asks for; raises ApiError if a setting is not supported."""
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
