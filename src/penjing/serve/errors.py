"""Errors as OpenAI's clients read them: {"error": {message, type, param, code}} and the right status."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from penjing.base.errors import UserError

log = logging.getLogger("penjing.serve")
TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """What a client gets instead of an answer. param: the field that is wrong. retry_after: seconds."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after: int = 0
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after = status, message, param, code, retry_after

    @property
    def body(self) -> dict[str, Any]:
        """The error object."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        """The error as a whole response."""
        headers = {"Retry-After": str(self.retry_after)} if self.retry_after else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body, self.status, headers)


def from_user_error(error: UserError, param: str | None = None) -> ApiError:
    """A value that the engine or the chat template refused."""
    return ApiError(400, error.line(), param=param)


def from_validation(error: ValidationError) -> ApiError:
    """The first field that is wrong, by its path; what was sent is not repeated."""
    found = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = _path(found["loc"])
    if found["type"] == "json_invalid" or not path:
        return ApiError(400, f"the body is not valid: {found['msg']}", code="invalid_json")
    return ApiError(400, f"{path}: {found['msg']}", param=path)


def _path(location: Sequence[int | str]) -> str:
    """`messages[0].role`; behind the first field of a union stand names of types, which nobody sent."""
    if not location:
        return ""
    depth = 3 if location[0] in ("messages", "tools") else 1
    path = str(location[0])
    for part in location[1:depth]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path


def handle_errors(app: FastAPI) -> None:
    """Every error of the app leaves it as an error object; a fault of ours says nothing of itself."""

    async def api_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        return error.response

    async def http_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        response = ApiError(error.status_code, str(error.detail), code=code).response
        response.headers.update(error.headers or {})
        return response

    async def fault(_: Request, error: Exception) -> JSONResponse:
        log.error("a request failed", exc_info=error)
        return ApiError(500, "the server failed on this request", code="internal_error").response

    async def left(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse(None, 499)  # the client has left: nobody reads it

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(ConnectionError, left)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, fault)
