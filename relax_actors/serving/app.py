"""HTTP application of the gateway: its routes, and who may use them.

It keeps no state of a conversation: a request carries all of it, and the rollout actor that holds a session's row knows
which tokens it continues. So a gateway may be killed at any moment, and its clients repeat their requests at another.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from relax_actors.data.tokenizer import Tokenizer
from relax_actors.errors import RelaxError
from relax_actors.serving import ask
from relax_actors.serving.answers import Answers, Limits
from relax_actors.serving.anthropic import MessagesBody, MessageWriter
from relax_actors.serving.ask import Ask, ChatBody, CompletionBody, GenerateBody, TokenizeBody, validated
from relax_actors.serving.chunks import ChatWriter, TextWriter
from relax_actors.serving.completion import token_response
from relax_actors.serving.control.control import Control
from relax_actors.serving.control.openapi import description, page
from relax_actors.serving.control.relax_routes import RelaxRoutes
from relax_actors.serving.control.routes import ControlRoutes
from relax_actors.serving.errors import ApiError
from relax_actors.serving.event_stream import wait_for_client
from relax_actors.serving.forms import offered_tools
from relax_actors.serving.live import Writer
from relax_actors.serving.requests import bearer, is_retry, player_of, read_object
from relax_actors.serving.responses import ResponsesBody, ResponseWriter
from relax_actors.serving.session_routes import SessionRoutes
from relax_actors.serving.tokens import is_any, session_token

Handler: TypeAlias = Callable[[Request, str], Coroutine[Any, Any, Response]]
_SESSION = re.compile(r"[A-Za-z0-9_-]{1,128}")


@dataclass(frozen=True, slots=True)
class Access:
    """Who may use the gateway.

    Attributes:
        tokens: bearer tokens of the gateway itself.
        secret: from which the tokens of sessions follow.
        operators: bearer tokens of those who may change the run.
    """

    tokens: tuple[str, ...]
    secret: str
    operators: tuple[str, ...] = ()


class Gateway:
    """The application; without `control` it has no routes for operators."""

    def __init__(self, answers: Answers, access: Access, limits: Limits, control: Control | None = None) -> None:
        self._answers, self._access, self._limits, self._control = answers, access, limits, control
        self._sessions = SessionRoutes(answers.policy, access.secret, limits)

    def app(self) -> Starlette:
        """Return the ASGI application."""
        posts: dict[str, Handler] = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": self._completions,
            "/v1/responses": self._responses,
            "/v1/messages": self._messages,
            "/v1/messages/count_tokens": self._count_tokens,
            "/tokenize": self._tokenize,
        }
        free: dict[str, Handler] = {
            "/v1/chat/completions/tokens": self._chat,
            "/inference/v1/generate": self._generate,
        }
        routes = [Route("/health", self._health, methods=["GET"])]
        routes += [self._route(path, handler) for path, handler in (posts | free).items()]
        routes += [self._route("/v1/models", self._models, "GET"), self._route("/sessions", self._sessions.take)]
        own = posts | {"/end": self._sessions.end, "/keep": self._sessions.keep}
        own["/environment"] = self._sessions.environment
        routes += [self._route("/sessions/{session}" + path, handler) for path, handler in own.items()]
        routes.append(self._route("/sessions/{session}/v1/models", self._models, "GET"))
        routes.append(self._route("/sessions/{session}", self._sessions.show, "GET"))
        if self._control is not None:
            routes += self._control_routes(self._control)
        return Starlette(routes=routes, exception_handlers={HTTPException: _plain_error})

    def _control_routes(self, control: Control) -> list[Route]:
        """Return the routes of operators, and the page that describes them."""
        handlers = [*ControlRoutes(control).handlers(), *RelaxRoutes(control).handlers()]
        document = description(handlers)
        routes = [self._route(path, handler, method, operates=True) for method, path, handler in handlers]

        async def as_json(request: Request) -> Response:
            del request
            return JSONResponse(document)

        async def as_page(request: Request) -> Response:
            del request
            return HTMLResponse(page(document))

        return [*routes, Route("/openapi.json", as_json), Route("/docs", as_page)]

    def _route(
        self,
        path: str,
        handler: Handler,
        method: str = "POST",
        *,
        operates: bool = False,
    ) -> Route:
        """Return a route for clients of the policy, or for operators, whose answers never queue."""
        authorize = self._authorize_operator if operates else self._authorize

        async def endpoint(request: Request) -> Response:
            try:
                session = request.path_params.get("session", "")
                authorize(request, session)
                with nullcontext() if operates else self._answers.admitted():
                    return await self._answers.while_open(handler(request, session))
            except ApiError as error:
                return _error(request, error)
            except RelaxError as error:
                return _error(request, ApiError(400, str(error), "invalid_request"))

        return Route(path, endpoint, methods=[method])

    def _authorize(self, request: Request, session: str) -> None:
        given = bearer(request)
        if not session:
            if not is_any(given, self._access.tokens):
                msg = "no valid token; send the gateway's token as `Authorization: Bearer <token>`"
                raise ApiError(401, msg, "invalid_token")
        elif not _SESSION.fullmatch(session) or not is_any(given, [session_token(self._access.secret, session)]):
            msg = f"the token is not that of session {session[:128]!r}; each session has a token of its own"
            raise ApiError(403, msg, "wrong_session")

    def _authorize_operator(self, request: Request, _: str) -> None:
        given = bearer(request)
        if is_any(given, self._access.operators):
            return
        if not given:
            msg = "no token; send an operator's token as `Authorization: Bearer <token>`"
            raise ApiError(401, msg, "invalid_token")
        msg = (
            "the token is no operator's, and only operators may change the run; see gateway/operator-token in the "
            "run's folder, or gateway.operator_token_file"
        )
        raise ApiError(403, msg, "not_an_operator")

    async def _health(self, request: Request) -> Response:
        del request
        return JSONResponse({"status": "ok"})

    async def _models(self, request: Request, session: str) -> Response:
        del request, session
        model = {"id": self._answers.model, "object": "model", "created": 0, "owned_by": "relax-actors"}
        return JSONResponse({"object": "list", "data": [model | {"max_model_len": self._answers.context_length}]})

    async def _chat(self, request: Request, session: str) -> Response:
        wanted = validated(ChatBody, await self._body(request)).ask()
        if wanted.prompt is None:
            ask.check_messages(wanted.messages)
        if session and wanted.prompt is not None:
            msg = "a conversation of a session is `messages`; send a prompt of `tokens` to /v1/completions"
            raise ApiError(400, msg, "unsupported_parameter")
        return await self._respond(request, wanted, session, ChatWriter)

    async def _completions(self, request: Request, session: str) -> Response:
        asked = validated(CompletionBody, await self._body(request)).ask()
        return await self._respond(request, asked, session, TextWriter)

    async def _responses(self, request: Request, session: str) -> Response:
        asked = validated(ResponsesBody, await self._body(request)).ask()
        return await self._respond(request, asked, session, ResponseWriter)

    async def _messages(self, request: Request, session: str) -> Response:
        asked = validated(MessagesBody, await self._body(request)).ask()
        return await self._respond(request, asked, session, MessageWriter)

    async def _respond(
        self, request: Request, asked: Ask, session: str, writer: Callable[[Ask, Tokenizer, str], Writer]
    ) -> Response:
        made = writer(asked, self._answers.tokenizer, self._answers.model)
        return await self._answers.respond(request, asked, session, made)

    async def _count_tokens(self, request: Request, session: str) -> Response:
        asked = validated(MessagesBody, await self._body(request)).ask()
        tokens = await self._answers.prompts.read(asked, session, player_of(request))
        return JSONResponse({"input_tokens": len(tokens)})

    async def _tokenize(self, request: Request, session: str) -> Response:
        body = validated(TokenizeBody, await self._body(request))
        if body.prompt is None:
            ask.check_messages(body.messages, "prompt or messages")
        tools, _ = offered_tools(body.tools or [], None)
        asked = Ask(messages=body.messages or [], tools=tools, prompt=body.prompt)
        read = await self._answers.prompts.read(
            asked, session, player_of(request), body.chat_template_kwargs, asks=body.add_generation_prompt
        )
        tokens = read.tolist()
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": self._answers.context_length})

    async def _generate(self, request: Request, session: str) -> Response:
        del session
        asked = validated(GenerateBody, await self._body(request)).ask()
        affinity = request.headers.get("x-session-id", "")[:128]
        work = asyncio.ensure_future(self._answers.complete(asked, "", is_retry=is_retry(request), affinity=affinity))
        try:
            await wait_for_client(request, work)
            (done,) = work.result()
        finally:
            work.cancel()
        return JSONResponse(token_response(done))

    async def _body(self, request: Request) -> dict[str, Any]:
        return await read_object(request, self._limits.max_body_bytes)


def _error(request: Request, error: ApiError) -> Response:
    body = error.anthropic() if "/v1/messages" in request.url.path else error.openai()
    return JSONResponse(body, error.status, error.headers())


async def _plain_error(request: Request, error: Exception) -> Response:
    """Answer a path or method that does not exist in the form of the API."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    asked, code = f"{request.method} {request.url.path[:200]}", "not_found"
    text = f"{asked}: no such route; the routes are listed in the documentation of the gateway"
    headers = dict(getattr(error, "headers", None) or {})
    if allowed := headers.get("Allow"):
        text, code = f"{asked}: this route takes {allowed} alone", "method_not_allowed"
    response = _error(request, ApiError(status, text, code))
    response.headers.update(headers)
    return response
