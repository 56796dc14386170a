"""The body of a request: read with a limit, and as the fields that a route wants."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.types import Receive

from penjing.serve.errors import ApiError, from_validation
from penjing.serve.limits import MAX_BODY_BYTES

Body = TypeVar("Body", bound=BaseModel)


def fields(body: bytes, kind: type[Body]) -> Body:
    """What a body says. Raises ApiError that names the field that is wrong."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise from_validation(error) from None


async def read(headers: Headers, receive: Receive) -> bytes:
    """The whole body. Raises ApiError while it is read, and ConnectionError if the client leaves.

    It must say that it is JSON: a form of another site cannot, and its script may not without our leave (CORS). How
    long it may take is watched by the connection (serve/connection.py).
    """
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(400, "send Content-Type: application/json", code="wrong_content_type")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(400, "send the body uncompressed", code="wrong_content_encoding")
    too_large = ApiError(413, f"the body has more than {MAX_BODY_BYTES:,} bytes", code="body_too_large")
    length = headers.get("content-length", "0")
    if not length.isascii() or not length.isdigit() or len(length) > 18 or int(length) > MAX_BODY_BYTES:
        raise too_large
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY_BYTES:
            raise too_large
        if not message.get("more_body", False):
            return b"".join(parts)
