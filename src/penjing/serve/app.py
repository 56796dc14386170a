"""The routes: OpenAI's API under /v1, the chat page's own API under /api, and the page."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from starlette.responses import JSONResponse, PlainTextResponse, Response

from penjing import __version__
from penjing.agent_tools.box import Toolbox
from penjing.data.chat.turn_parser import ToolCall
from penjing.serve import chat, completions
from penjing.serve.errors import ApiError, handle_errors
from penjing.serve.generation import PendingResponse, Service, Target
from penjing.serve.guard import ADMITTED, CHAT, COMPLETIONS, TOKENIZE, Guard, client_of
from penjing.serve.hub import Hub
from penjing.serve.limits import GRAMMAR_PLACES, TOOL_PLACES
from penjing.serve.metrics import Metrics
from penjing.serve.models import Models
from penjing.serve.page_files import PAGE, add_page
from penjing.serve.pool import FairPool
from penjing.serve.request_body import parse_body, read_body
from penjing.serve.schema import ChatRequest, CompletionRequest, TokenizeRequest, ToolCallRequest
from penjing.serve.streams import EventStream, dumps, run_unless_disconnected


def make_app(
    models: Models, toolbox: Toolbox, *, key: str = "", loopback_only: bool = True, max_tokens: int
) -> FastAPI:
    """The server's app. The engine thread runs as long as the app (`lifespan`)."""

    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        hub = Hub({name: model.engine for name, model in models.served.items()})
        pools = FairPool("grammars", *GRAMMAR_PLACES), FairPool("tool calls", *TOOL_PLACES)
        app.state.service = Service(models, hub, max_tokens, metrics, *pools)
        try:
            yield
        finally:
            await asyncio.to_thread(hub.close)
            for closable in (*pools, models):
                closable.close()

    app = FastAPI(title="penjing", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    handle_errors(app)
    _add_api(app, models, loopback_only)
    _add_tools(app, models, toolbox)
    _add_status(app)
    open_paths = add_page(app, (file for file in sorted(PAGE.iterdir()) if file.is_file()))
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    app.add_middleware(
        Guard,
        key=key,
        loopback_only=loopback_only,
        open_paths=("/health", *open_paths),
        on_response=metrics.count_response,
    )
    return app


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def _respond(
    request: Request,
    work: PendingResponse,
    collect: Callable[[PendingResponse], Awaitable[dict[str, Any]]],
    chunks: AsyncIterator[bytes] | None,
) -> Response:
    if chunks is not None:
        return EventStream(chunks)
    return Response(dumps(await run_unless_disconnected(request, collect(work))), media_type="application/json")


def _add_api(app: FastAPI, models: Models, loopback_only: bool) -> None:
    @app.post(CHAT, **_documented(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        job, content = request.scope[ADMITTED]
        body = parse_body(content, ChatRequest)
        work = await chat.start(_service(request), body, job)
        opening = [choice.opening for choice in work.choices]  # type: ignore[attr-defined]
        chunks = work.stream("chat.completion.chunk", opening, usage=body.wants_usage) if body.stream else None
        return await _respond(request, work, chat.collect, chunks)

    @app.post(COMPLETIONS, **_documented(CompletionRequest))
    async def text_completions(request: Request) -> Response:
        job, content = request.scope[ADMITTED]
        body = parse_body(content, CompletionRequest)
        work = await completions.start(_service(request), body, job)
        chunks = work.stream("text_completion", (), usage=body.wants_usage) if body.stream else None
        return await _respond(request, work, completions.collect, chunks)

    @app.post(TOKENIZE, **_documented(TokenizeRequest))
    async def tokenize(request: Request) -> JSONResponse:
        job, content = request.scope[ADMITTED]
        body = parse_body(content, TokenizeRequest)
        target = Target.of(_service(request), body, job)
        if body.prompt is not None:
            ids = (await completions.encode(target, [body.prompt]))[0].ids
        elif body.messages:
            ids = (await chat.encode(target, body)).prompt
        else:
            raise ApiError(400, "messages: or prompt is required", param="messages")
        return JSONResponse({"count": len(ids), "max_model_len": target.served.context, "tokens": ids})

    created = int(time.time())

    def describe(name: str) -> dict[str, Any]:
        model, adapter = models.find(name)
        info = {
            "answers": model.is_chat(adapter),
            "thinking": model.thinking,
            "context": model.context,
            "step": model.loaded.checkpoint.step,
            "adapters": list(model.adapters),
            "parameters": model.parameters,
            "examples": list(model.examples) if loopback_only and not adapter else [],  # may be of private data
        }
        return {"id": name, "object": "model", "created": created, "owned_by": "penjing", "penjing": info}

    @app.get("/v1/models", responses=_ERRORS)
    async def list_models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [describe(name) for name in models.names]})

    @app.get("/v1/models/{name:path}", responses=_ERRORS)
    async def show_model(name: str) -> JSONResponse:
        return JSONResponse(describe(name))


def _add_tools(app: FastAPI, models: Models, toolbox: Toolbox) -> None:
    @app.get("/api/tools", responses=_ERRORS)
    async def list_tools() -> JSONResponse:
        return JSONResponse({"tools": [{"type": "function", "function": schema} for schema in toolbox.schemas]})

    @app.post("/api/tools/call", **_documented(ToolCallRequest))
    async def call_tool(request: Request) -> JSONResponse:
        content = await read_body(request.headers, request.receive, models.max_body_bytes)
        body = parse_body(content, ToolCallRequest)
        if body.name not in toolbox.tools:
            raise ApiError(404, "name: no such tool is offered", param="name", code="tool_not_found")
        call = ToolCall(name=body.name, arguments=body.arguments)
        client = client_of(request.scope, request.headers)
        (result,) = await _service(request).tools.run(client, lambda: toolbox.run([call]))
        return JSONResponse({"text": result.text, "is_answer": result.is_answer})


def _add_status(app: FastAPI) -> None:
    @app.get("/health", responses=_ERRORS)
    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok", "models": list(_service(request).models.names)})

    @app.get("/metrics", response_class=PlainTextResponse, responses=_ERRORS)
    async def metrics(request: Request) -> PlainTextResponse:
        service = _service(request)
        return PlainTextResponse(service.metrics.text(service.hub.statistics()))


# --- OpenAPI schema -------------------------------------------------------------------------------------------------

_OPTIONAL = {"type": ["string", "null"]}
_FIELDS = {"message": {"type": "string"}, "type": {"type": "string"}, "param": _OPTIONAL, "code": _OPTIONAL}
_ERROR = {"type": "object", "required": list(_FIELDS), "properties": _FIELDS}
_ERROR_SCHEMA = {"type": "object", "required": ["error"], "properties": {"error": _ERROR}}
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


def _documented(model_type: type[BaseModel]) -> dict[str, Any]:
    """The arguments of a route whose body is read by `read_body`."""
    schema = {"$ref": _REFERENCE.format(model=model_type.__name__)}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"responses": _ERRORS, "openapi_extra": {"requestBody": body}, "response_class": JSONResponse}


def _openapi(app: FastAPI) -> dict[str, Any]:
    if not app.openapi_schema:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for model_type in (ChatRequest, CompletionRequest, TokenizeRequest, ToolCallRequest):
            schema = model_type.model_json_schema(ref_template=_REFERENCE)
            schemas |= schema.pop("$defs", {}) | {model_type.__name__: schema}
        app.openapi_schema = document
    return app.openapi_schema
