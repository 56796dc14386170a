"""The routes: OpenAI's API under /v1, what the chat page asks beyond it under /api, and the page."""

from __future__ import annotations

import asyncio
import mimetypes
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from starlette.responses import JSONResponse, PlainTextResponse, Response

from penjing import __version__
from penjing.agent_tools.box import Toolbox
from penjing.data.chat.turn_parser import ToolCall
from penjing.serve import chat, completions
from penjing.serve.bodies import Body, fields, read
from penjing.serve.errors import ApiError, handle_errors
from penjing.serve.generation import Service, Work
from penjing.serve.guard import CHAT, COMPLETIONS, Guard, client_of
from penjing.serve.hub import Hub, Job
from penjing.serve.metrics import Metrics
from penjing.serve.models import Models
from penjing.serve.schema import ChatRequest, CompletionRequest, ToolCallRequest
from penjing.serve.streams import EventStream, dumps, unless_left

PAGE = Path(__file__).parent / "page"
# No inline script, nothing from elsewhere: what a model writes can be shown, and does nothing.
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def make_app(
    models: Models, toolbox: Toolbox, *, key: str = "", loopback_only: bool = True, max_tokens: int
) -> FastAPI:
    """The server's app. The engines' thread runs while the app does (`lifespan`)."""

    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        hub = Hub({name: model.engine for name, model in models.served.items()})
        app.state.service = Service(models, hub, max_tokens, metrics)
        try:
            yield
        finally:
            await asyncio.to_thread(hub.close)

    app = FastAPI(title="penjing", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    handle_errors(app)
    _add_api(app, models)
    _add_tools(app, toolbox)
    _add_status(app)
    open_paths = _add_page(app)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    app.add_middleware(
        Guard,
        key=key,
        loopback_only=loopback_only,
        open_paths=("/health", *open_paths),
        answered=metrics.answered,
    )
    return app


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


@asynccontextmanager
async def _place(request: Request, kind: type[Body]) -> AsyncIterator[tuple[Body, Job]]:
    """The fields, and a place in the queue, which is free again where the request comes to nothing.

    Raises ApiError if there is no place, before the body is looked at, or for fields that are wrong.
    """
    service = _service(request)
    content = await read(request.headers, request.receive)
    job = service.hub.admit(client_of(request.scope, request.headers))
    try:
        await service.turn()
        yield fields(content, kind), job
    except BaseException:
        service.hub.cancel(job)
        raise


async def _respond(
    request: Request,
    work: Work,
    whole: Callable[[Work], Awaitable[dict[str, Any]]],
    chunks: AsyncIterator[bytes] | None,
) -> Response:
    """The answer in one piece, or as it comes."""
    if chunks is not None:
        return EventStream(chunks, work.cancel)
    try:
        return Response(dumps(await unless_left(request, whole(work))), media_type="application/json")
    finally:
        work.cancel()


def _add_api(app: FastAPI, models: Models) -> None:
    @app.post(CHAT, **_documented(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        async with _place(request, ChatRequest) as (body, job):
            work = await chat.begin(_service(request), body, job)
        opening = [choice.opening for choice in work.choices]  # type: ignore[attr-defined]
        chunks = work.stream("chat.completion.chunk", opening, usage=body.wants_usage) if body.stream else None
        return await _respond(request, work, chat.whole, chunks)

    @app.post(COMPLETIONS, **_documented(CompletionRequest))
    async def text_completions(request: Request) -> Response:
        async with _place(request, CompletionRequest) as (body, job):
            work = await completions.begin(_service(request), body, job)
        chunks = work.stream("text_completion", (), usage=body.wants_usage) if body.stream else None
        return await _respond(request, work, completions.whole, chunks)

    created = int(time.time())

    def describe(name: str) -> dict[str, Any]:
        model, adapter = models.find(name)
        facts = {
            "answers": model.answers_with(adapter),
            "thinking": model.thinking,
            "context": model.context,
            "step": model.loaded.checkpoint.step,
            "adapters": list(model.adapters),
            "parameters": model.parameters,
        }
        return {"id": name, "object": "model", "created": created, "owned_by": "penjing", "penjing": facts}

    @app.get("/v1/models", responses=_ERRORS)
    async def list_models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [describe(name) for name in models.names]})

    @app.get("/v1/models/{name:path}", responses=_ERRORS)
    async def show_model(name: str) -> JSONResponse:
        return JSONResponse(describe(name))


def _add_tools(app: FastAPI, toolbox: Toolbox) -> None:
    @app.get("/api/tools", responses=_ERRORS)
    async def list_tools() -> JSONResponse:
        return JSONResponse({"tools": [{"type": "function", "function": schema} for schema in toolbox.schemas]})

    @app.post("/api/tools/call", **_documented(ToolCallRequest))
    async def call_tool(request: Request) -> JSONResponse:
        body = fields(await read(request.headers, request.receive), ToolCallRequest)
        if body.name not in toolbox.tools:
            raise ApiError(404, "name: no such tool is offered", param="name", code="tool_not_found")
        call = ToolCall(name=body.name, arguments=body.arguments)
        (result,) = await asyncio.to_thread(toolbox.run, [call])
        return JSONResponse({"text": result.text, "is_answer": result.is_answer})


def _add_status(app: FastAPI) -> None:
    @app.get("/health", responses=_ERRORS)
    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok", "models": list(_service(request).models.names)})

    @app.get("/metrics", response_class=PlainTextResponse, responses=_ERRORS)
    async def metrics(request: Request) -> PlainTextResponse:
        service = _service(request)
        return PlainTextResponse(service.metrics.text(service.hub.statistics()))


def _add_page(app: FastAPI) -> list[str]:
    """The page's files, read once; returns their paths."""
    paths = []
    for file in sorted(PAGE.iterdir()) if PAGE.is_dir() else ():
        if file.is_file():
            path = "/" if file.name == "index.html" else f"/{file.name}"
            app.add_api_route(path, _file(file), methods=["GET"], include_in_schema=False)
            paths.append(path)
    return paths


def _file(file: Path) -> Callable[[], Awaitable[Response]]:
    body, kind = file.read_bytes(), mimetypes.guess_type(file.name)[0] or "application/octet-stream"
    headers = {
        "Content-Security-Policy": PAGE_POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }

    async def send_file() -> Response:
        return Response(body, media_type=kind, headers=headers)

    return send_file


# --- the description of the API --------------------------------------------------------------------------------------

_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {"schema": _ERROR_SCHEMA}}}
    for status, text in (
        (400, "a field is wrong"),
        (401, "no or wrong key"),
        (403, "wrong Host header"),
        (404, "no such model"),
        (413, "too large"),
        (429, "too many wait"),
        (500, "a fault of the server"),
        (503, "no answer in time"),
    )
}
_REFERENCE = "#/components/schemas/{model}"


def _documented(kind: type[BaseModel]) -> dict[str, Any]:
    """The arguments of a route whose body is read by `read`."""
    schema = {"$ref": _REFERENCE.format(model=kind.__name__)}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"responses": _ERRORS, "openapi_extra": {"requestBody": body}, "response_class": JSONResponse}


def _openapi(app: FastAPI) -> dict[str, Any]:
    if not app.openapi_schema:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for kind in (ChatRequest, CompletionRequest, ToolCallRequest):
            schema = kind.model_json_schema(ref_template=_REFERENCE)
            schemas |= schema.pop("$defs", {}) | {kind.__name__: schema}
        app.openapi_schema = document
    return app.openapi_schema
