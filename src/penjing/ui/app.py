"""The app of `penjing ui`: the page, and the routes of its parts, which only a holder of the token reaches."""

from collections import ChainMap
from collections.abc import AsyncIterator, Container
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from penjing import __version__
from penjing.base.errors import UserError
from penjing.report import charts
from penjing.serve.access import check_host, check_key
from penjing.serve.errors import ApiError, from_user_error, handle_errors
from penjing.serve.page_files import PAGE as CHAT_PAGE
from penjing.serve.page_files import add_page
from penjing.ui import blind, data, plan, runs, train
from penjing.ui.processes import Chats, Trainings
from penjing.ui.site import Site, run_in_thread

PAGE = Path(__file__).parent / "page"
CHARTS = Path(charts.__file__).parent / "vendor"
# Of the chat page, and used here as they are.
SHARED = (
    *("api.js", "dom.js", "i18n.js", "preferences.js", "sentences.js", "theme.js"),
    *("page.css", "tree.svg", "chevron.svg"),
)


def make_app(site: Site, token: str, *, loopback_only: bool = True) -> FastAPI:
    """The app. token: required on every path but those of the page's files."""
    trainings, chats = Trainings(site), Chats()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await run_in_thread(chats.close)

    app = FastAPI(
        lifespan=lifespan, title="penjing ui", version=__version__, docs_url=None, redoc_url=None, openapi_url=None
    )
    handle_errors(app)
    app.add_exception_handler(UserError, _user_error)
    runs.add_routes(app, site, trainings)
    train.add_routes(app, site, trainings, chats)
    blind.add_routes(app, site, chats)
    plan.add_routes(app, site)
    data.add_routes(app, site)
    files = [*(CHAT_PAGE / name for name in SHARED), *sorted(PAGE.iterdir()), *sorted(CHARTS.iterdir())]
    open_paths = add_page(app, (file for file in files if file.is_file()))
    paths: ChainMap[str, Any] = ChainMap(site.open_once, dict.fromkeys(open_paths))
    app.add_middleware(Gate, token=token.encode(), loopback_only=loopback_only, open_paths=paths)
    return app


async def _user_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, UserError)
    return from_user_error(error, None if error.where is None else str(error.where)).response


class Gate:
    """Refuses other Host headers, requests of other sites, and those without the token."""

    def __init__(self, app: ASGIApp, *, token: bytes, loopback_only: bool, open_paths: Container[str]) -> None:
        self.app, self.token, self.loopback_only, self.open_paths = app, token, loopback_only, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope["path"], Headers(scope=scope))
            except ApiError as error:
                await error.response(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _check(self, path: str, headers: Headers) -> None:
        if self.loopback_only:
            check_host(headers)
        if path in self.open_paths:
            return
        origins = headers.getlist("origin")
        if any(urlsplit(origin).netloc.lower() != headers.get("host", "").lower() for origin in origins):
            raise ApiError(403, "this is not for pages of other sites", code="wrong_origin")
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            raise ApiError(403, "this is not for pages of other sites", code="wrong_origin")
        check_key(headers, self.token)
