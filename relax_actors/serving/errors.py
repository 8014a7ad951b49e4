"""Errors of HTTP requests, in the forms that the SDKs of OpenAI and Anthropic read."""

from __future__ import annotations

from typing import Any

from relax_actors.messages.generate import Refusal

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    410: "not_found_error",
    411: "invalid_request_error",
    413: "request_too_large",
    421: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_REFUSALS = {
    Refusal.BUSY: (503, "busy"),
    Refusal.ELSEWHERE: (503, "no_holder"),
    Refusal.ENDED: (410, "session_ended"),
    Refusal.INVALID: (400, "invalid_request"),
    Refusal.TOO_LONG: (400, "context_length_exceeded"),
    Refusal.ENVIRONMENT: (422, "environment_failed"),
    Refusal.FAILED: (500, "engine_failed"),
}


class ApiError(Exception):
    """A request that is answered with an error.

    Args:
        status: HTTP status.
        message: what is wrong with what, and the remedy.
        code: short name of the error, for programs.
        retry_after: seconds after which the client may try again; None if it should not.
    """

    def __init__(self, status: int, message: str, code: str = "", retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.retry_after = status, message, code, retry_after

    def headers(self) -> dict[str, str]:
        """Headers of the response."""
        return {} if self.retry_after is None else {"Retry-After": f"{self.retry_after:g}"}

    def openai(self) -> dict[str, Any]:
        """Body in the form of OpenAI's API."""
        kind = _KINDS.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": None, "code": self.code or None}}

    def anthropic(self) -> dict[str, Any]:
        """Body in the form of Anthropic's API."""
        return {"type": "error", "error": {"type": _KINDS.get(self.status, "api_error"), "message": self.message}}


def refused(refusal: str, detail: str) -> ApiError:
    """Return the error of a request that a rollout actor refused."""
    status, code = _REFUSALS.get(Refusal(refusal), (500, "failed")) if refusal in set(Refusal) else (500, "failed")
    return ApiError(status, detail, code, 1.0 if status == 503 else None)  # noqa: PLR2004 service unavailable
