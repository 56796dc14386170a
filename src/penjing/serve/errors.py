"""Errors in OpenAI's format: {"error": {message, type, param, code}} and the HTTP status."""

import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from penjing.base.errors import UserError

log = logging.getLogger("penjing.serve")
TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An error response. param: the wrong field. retry_after: seconds."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after: int = 0
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after = status, message, param, code, retry_after

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        headers = {"Retry-After": str(self.retry_after)} if self.retry_after else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body, self.status, headers)


def from_user_error(error: UserError, param: str | None = None) -> ApiError:
    """For a value that the engine or the chat template rejected."""
    return ApiError(400, error.line(), param=param)


def from_validation(error: ValidationError) -> ApiError:
    """The first wrong field, by its path. What it says of the sent value is short."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    path = _path(errors[0]["loc"])
    same_field = [each for each in errors if _path(each["loc"]) == path]  # one for each kind of value it may have
    first_error = max(same_field, key=lambda each: (len(each["loc"]), not each["type"].endswith("_type")))  # best fit
    if first_error["type"] == "json_invalid" or not path:
        return ApiError(400, f"the body is not valid: {first_error['msg']}", code="invalid_json")
    problem = first_error["msg"].removeprefix("Value error, ")[:300]
    if first_error["type"] == "missing":
        problem = f"{first_error['loc'][-1]} is required"
    return ApiError(400, f"{path}: {problem}", param=path)


def _path(location: Sequence[int | str]) -> str:
    """Such as `messages[0].role`. Cut at a depth, since pydantic adds type names of unions behind it."""
    if not location:
        return ""
    depth = {"messages": 3, "tools": 3, "logit_bias": 2}.get(str(location[0]), 1)
    path = str(location[0])
    for key in location[1:depth]:
        path += f"[{key}]" if isinstance(key, int) else f".{key[:64]}"
    return path


def handle_errors(app: FastAPI) -> None:
    """Return every error as an error object; internal errors without details."""

    async def api_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        return error.response

    async def http_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        message = f"{request.method} {request.url.path[:100]}: {error.detail}; /openapi.json lists what is served"
        response = ApiError(error.status_code, message, code=code).response
        response.headers.update(error.headers or {})
        return response

    async def internal_error(_: Request, error: Exception) -> JSONResponse:
        log.error("a request failed", exc_info=error)
        return ApiError(500, "the server failed on this request", code="internal_error").response

    async def client_disconnected(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse(None, 499)  # the client has disconnected: nobody reads it

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(ConnectionError, client_disconnected)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, internal_error)
