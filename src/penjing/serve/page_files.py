"""The files of a page, sent from memory with headers that keep other origins and inline scripts out."""

import mimetypes
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from fastapi import FastAPI
from starlette.responses import Response

PAGE = Path(__file__).parent / "page"
# No inline script and no other origin: HTML in a model's answer cannot run.
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": PAGE_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI, files: Iterable[Path]) -> list[str]:
    """Serve each file under its name, and index.html as /; returns the paths."""
    paths = []
    for file in files:
        paths.append("/" if file.name == "index.html" else f"/{file.name}")
        media_type = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
        send = partial(_send, file.read_bytes(), media_type)
        app.add_api_route(paths[-1], send, methods=["GET", "HEAD"], include_in_schema=False)
    return paths


async def _send(body: bytes, media_type: str) -> Response:
    return Response(body, media_type=media_type, headers=HEADERS)
