"""Errors of the console's requests, as JSON that the page shows."""

from __future__ import annotations

from starlette.responses import JSONResponse


class RequestError(Exception):
    """A request that is answered with an error.

    Args:
        status: HTTP status.
        message: what is wrong with what, and the remedy.
        code: short name of the error, for programs.
    """

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code

    def response(self) -> JSONResponse:
        """Return the answer: `{"error": {"message", "code"}}`."""
        return JSONResponse({"error": {"message": self.message, "code": self.code}}, self.status)
