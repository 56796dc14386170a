"""The files of a page, sent from memory with headers that keep other origins and inline scripts out."""

import mimetypes
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from fastapi import FastAPI
from starlette.responses import Response

PAGE = Path(__file__).parent / "page"
# No inline script and no other origin: HTML in a model's answer cannot run.
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def add_page(app: FastAPI, files: Iterable[Path]) -> list[str]:
    """Serve each file under its name, and index.html as /; returns the paths."""
    paths = []
    for file in files:
        path = "/" if file.name == "index.html" else f"/{file.name}"
        app.add_api_route(path, _file(file), methods=["GET"], include_in_schema=False)
        paths.append(path)
    return paths


def _file(file: Path) -> Callable[[], Awaitable[Response]]:
    body, media_type = file.read_bytes(), mimetypes.guess_type(file.name)[0] or "application/octet-stream"
    headers = {
        "Content-Security-Policy": PAGE_POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }

    async def send_file() -> Response:
        return Response(body, media_type=media_type, headers=headers)

    return send_file
