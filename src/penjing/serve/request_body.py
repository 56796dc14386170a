"""The body of a request: read it with a size limit, and parse it into fields."""

import gc
import re
from itertools import islice
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.types import Receive

from penjing.serve.errors import ApiError, from_validation
from penjing.serve.limits import MAX_PROMPT_VALUES, MAX_VALUES
from penjing.serve.schema import CompletionRequest

Body = TypeVar("Body", bound=BaseModel)
_VALUE = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{,]', re.DOTALL)


def has_more_values(body: bytes, limit: int) -> bool:
    """Whether JSON has more than so many strings, lists, objects and commas; much cheaper than to parse it."""
    return next(islice(_VALUE.finditer(body), limit, None), None) is not None


def parse_body(body: bytes, model_type: type[Body]) -> Body:
    """Parse a body. Raises ApiError, which names the wrong field."""
    limit = MAX_PROMPT_VALUES if model_type is CompletionRequest else MAX_VALUES
    if has_more_values(body, limit):
        raise ApiError(413, f"the body has more than {limit:,} values", code="body_too_large")
    gc.disable()  # it would visit each new object several times: half of the time of nested lists
    try:
        return model_type.model_validate_json(body)
    except ValidationError as error:
        raise from_validation(error) from None
    finally:
        gc.enable()


async def read_body(headers: Headers, receive: Receive, max_bytes: int) -> bytes:
    """The complete body. Raises ApiError as soon as it is invalid, and ConnectionError if the client disconnects.

    Content-Type must be JSON: a form on another site cannot send it, and a script there needs our permission (CORS).
    The connection limits the time (serve/connection.py).
    """
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(400, "send Content-Type: application/json", code="wrong_content_type")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(400, "send the body uncompressed", code="wrong_content_encoding")
    too_large = ApiError(413, f"the body has more than {max_bytes:,} bytes", code="body_too_large")
    length = headers.get("content-length", "0")
    if not length.isascii() or not length.isdigit() or len(length) > 18 or int(length) > max_bytes:
        raise too_large
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > max_bytes:
            raise too_large
        if not message.get("more_body", False):
            return b"".join(parts)
