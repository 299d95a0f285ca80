"""The aiohttp application: routes, request ids, errors to HTTP, start and stop of the cluster."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

from aiohttp import web

from gateway import operations
from gateway.anthropic import endpoint as messages
from gateway.anthropic import error as anthropic_error
from gateway.errors import (
    BodyTimeout,
    BrokenBody,
    ErrorForm,
    PayloadTooLarge,
    error_body,
    error_response,
)
from gateway.observe.request_metrics import count_failure
from gateway.openai import chat, completions, tokenize
from gateway.pages import dashboard
from gateway.request_ids import ANSWER_ID, client_request_id, echo_request_id
from gateway.request_ids import HEADER as REQUEST_ID_HEADER
from gateway.responses import endpoint as responses
from gateway.routing.cluster import WorkerSource
from gateway.server_state import SERVER_STATE, ServerState
from mesh.errors import InvalidRequest, PdmeshError
from mesh.telemetry.log_format import about

_logger = logging.getLogger(__name__)
_CLIENT_GONE = 499
"""Status, seen by nobody, of a request whose client broke the connection in a write."""

_DRAIN_S = 5.0
"""How long running requests may finish after SIGTERM."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class WorkerView(WorkerSource, Protocol):
    """``mesh.registry.view.ClusterView``: a source of workers that must be started."""

    async def start(self) -> None:
        """Begin to follow the registry."""

    async def close(self) -> None:
        """Stop."""


def build_app(server: ServerState, view: WorkerView) -> web.Application:
    """Wire the application; starting it follows ``view`` and links to its workers."""
    app = web.Application(client_max_size=server.max_body_bytes, middlewares=[_errors_to_http])
    app[SERVER_STATE] = server
    app.on_response_prepare.append(_echo_request_id)
    app.on_shutdown.append(_drain)
    app.cleanup_ctx.append(_linked(view))
    app.cleanup_ctx.append(dashboard.sampled)
    app.router.add_post("/v1/chat/completions", chat.chat_completions)
    app.router.add_post("/v1/completions", completions.completions)
    app.router.add_post("/v1/responses", responses.responses)
    app.router.add_post(messages.PATH, messages.messages)
    app.router.add_post(f"{messages.PATH}/count_tokens", messages.count_tokens)
    app.router.add_post("/tokenize", tokenize.tokenize)
    app.router.add_post("/detokenize", tokenize.detokenize)
    app.router.add_get("/v1/models", operations.list_models)
    app.router.add_get("/v1/models/{id:.+}", operations.get_model)
    app.router.add_get("/openapi.json", operations.openapi)
    app.router.add_get("/docs", operations.docs)
    app.router.add_get("/health", operations.health)
    app.router.add_get("/ready", operations.ready)
    app.router.add_get("/metrics", operations.show_metrics)
    app.router.add_get("/debug/census", operations.census)
    app.router.add_get("/debug/dashboard", dashboard.show_figures)
    app.router.add_get("/dashboard", dashboard.show_page)
    return app


def _linked(view: WorkerView) -> Callable[[web.Application], AsyncIterator[None]]:
    async def context(app: web.Application) -> AsyncIterator[None]:
        server = app[SERVER_STATE]
        await view.start()
        server.cluster.start(view)
        try:
            yield
        finally:
            await server.cluster.close()
            await view.close()
            server.close()

    return context


async def _drain(app: web.Application) -> None:
    """Runs when nothing listens any more and before aiohttp cancels the handlers."""
    await app[SERVER_STATE].drain(_DRAIN_S)


def _is_anthropic(request: web.Request) -> bool:
    return request.path == messages.PATH or request.path.startswith(messages.PATH + "/")


async def _echo_request_id(request: web.Request, response: web.StreamResponse) -> None:
    await echo_request_id(request, response)
    if _is_anthropic(request):
        response.headers["Request-Id"] = response.headers[REQUEST_ID_HEADER]


@web.middleware
async def _errors_to_http(request: web.Request, handler: Handler) -> web.StreamResponse:
    form = anthropic_error.error_body if _is_anthropic(request) else error_body
    try:
        return await handler(request)
    except PdmeshError as error:
        count_failure(error.code)
        _logger.debug("refused path=%s", request.path, extra=_ids(request) | {"code": error.code})
        response = error_response(error, form)
        if isinstance(error, BodyTimeout | BrokenBody):
            response.force_close()  # where the next request begins is not known
        return response
    except web.HTTPRequestEntityTooLarge:
        return error_response(PayloadTooLarge("the body is too large"), form)
    except web.HTTPException as error:
        return _http_error(error, form)
    except ConnectionError:
        return web.Response(status=_CLIENT_GONE)
    except Exception:
        _logger.exception("request failed path=%s", request.path, extra=_ids(request))
        count_failure(PdmeshError.code)
        return error_response(PdmeshError("internal error"), form)


def _ids(request: web.Request) -> dict[str, str]:
    return about(request.get(ANSWER_ID) or "", client_request_id=client_request_id(request))


def _http_error(error: web.HTTPException, form: ErrorForm) -> web.Response:
    """Routing errors of aiohttp (404, 405, a broken body) in the API's form."""
    wrapped = InvalidRequest(f"{error.status} {error.reason}")
    wrapped.http_status = error.status
    wrapped.code = error.reason.lower().replace(" ", "_")
    response = error_response(wrapped, form)
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response
