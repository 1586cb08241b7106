"""vLLM's HTTP surface, and the two routes of the simulator's own (`/simulator/stats`, `/simulator/fault`)."""

import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web

from fulcrum_core.errors import InvalidInput
from fulcrum_simulator.engine import EngineDead, EngineRequest, block_hashes
from fulcrum_simulator.server.faults import parse_fault
from fulcrum_simulator.server.handoff import CACHED_KEY, answer_params, read_handoff
from fulcrum_simulator.server.requests import Ask, Refused, check_role, parse_ask, parse_body, parse_prompt
from fulcrum_simulator.server.responses import (
    DONE,
    ENGINE_DEAD,
    AnswerShape,
    Usage,
    error_event,
    error_object,
)
from fulcrum_simulator.server.service import EngineService
from fulcrum_simulator.server.sinks import Ending, EventStream, WholeAnswer
from fulcrum_simulator.text import BYTES_PER_TOKEN, count_tokens, prompt_digest

ENGINE_VERSION = "0.32.0"
_BODY_LIMIT = 64 * 1024 * 1024
_SIMULATOR = "/simulator/"
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One checked request with its ids and the fixed parts of its answer."""

    ask: Ask
    request: EngineRequest
    shape: AnswerShape


class EngineApp:
    """The routes over one engine service."""

    def __init__(self, service: EngineService) -> None:
        self._service = service
        self._created_s = int(time.time())

    def build(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(client_max_size=_BODY_LIMIT, middlewares=[self._guard])
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ping", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/load", self._load)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/simulator/stats", self._stats)
        app.router.add_post("/simulator/fault", self._fault)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Errors as vLLM's error object; a hanging engine answers nothing but the simulator's own routes."""
        if not request.path.startswith(_SIMULATOR):
            await self._service.while_hung()
        try:
            return await handler(request)
        except Refused as refusal:
            return _error(refusal.message, kind=refusal.kind, status=refusal.status, param=refusal.param)
        except InvalidInput as error:
            return _error(str(error), kind="BadRequestError", status=400)
        except EngineDead:
            return _error(ENGINE_DEAD, kind="InternalServerError", status=500)
        except web.HTTPException as error:
            return _error(error.reason, kind=error.reason.replace(" ", ""), status=error.status)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, chat=False)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, chat=True)

    async def _generate(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        service = self._service
        if service.refusing:
            message = "The server is too busy; try a different instance."
            raise Refused(message, status=503, kind="ServiceUnavailableError")
        if service.runner.dead:
            raise EngineDead
        call = self._read_call(
            parse_body(await request.read()), request.headers.get("X-Request-Id"), chat=chat
        )
        if call.ask.stream:
            return await self._stream(request, call)
        return await self._answer(call)

    def _read_call(self, body: dict[str, Any], request_id: str | None, *, chat: bool) -> _Call:
        service = self._service
        ask = parse_ask(
            body, chat=chat, model=service.options.model, max_model_tokens=service.options.max_model_tokens
        )
        check_role(ask, service.options.role)
        given = request_id or uuid.uuid4().hex
        answer_id = f"chatcmpl-{given}" if chat else f"cmpl-{given}"
        return _Call(
            ask=ask,
            request=EngineRequest(
                id=f"{answer_id}{'' if chat else '-0'}-{uuid.uuid4().hex[:8]}",
                arrival_s=service.runner.now_s(),
                prompt_tokens=ask.prompt_tokens,
                max_tokens=ask.max_tokens,
                digest=prompt_digest(ask.prompt),
                block_hashes=block_hashes(
                    ask.prompt,
                    block_bytes=service.options.profile.block_size * BYTES_PER_TOKEN,
                    salt=ask.cache_salt.encode()[:64],
                ),
                priority=ask.priority,
                handoff=read_handoff(ask.kv_transfer_params),
            ),
            shape=AnswerShape(answer_id=answer_id, model=ask.model, created_s=int(time.time()), chat=chat),
        )

    async def _answer(self, call: _Call) -> web.Response:
        sink = WholeAnswer()
        self._service.submit(call.request, sink)
        try:
            ending = await sink.ending
        finally:
            self._service.runner.abort(call.request.id)
        body = call.shape.whole(
            sink.text,
            finish_reason=ending.reason,
            usage=_usage(call.ask, ending),
            kv_transfer_params=self._answer_params(ending),
        )
        return web.Response(body=body, content_type="application/json")

    async def _stream(self, request: web.Request, call: _Call) -> web.StreamResponse:
        """Headers go out at once and every token from the step loop; only the end is written here."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        transport = request.transport
        if transport is None:
            return response
        sink = EventStream(call.shape, transport, max_tokens=call.ask.max_tokens)
        self._service.submit(call.request, sink)
        try:
            ending = await sink.ending
        except EngineDead:
            tail = error_event(ENGINE_DEAD, kind="InternalServerError", status=500)
        else:
            tail = call.shape.usage(_usage(call.ask, ending)) if call.ask.include_usage else b""
        finally:
            self._service.runner.abort(call.request.id)
        await response.write(tail + DONE)
        return response

    def _answer_params(self, ending: Ending) -> dict[str, Any] | None:
        end = ending.end
        if end is None or end.export is None:
            return None
        return answer_params(
            end.export,
            engine_id=self._service.runner.engine.engine_id,
            host=self._service.options.host,
            port=self._service.side_channel_port,
            tensor_parallel=self._service.options.profile.tensor_parallel,
            cached_tokens=end.cached_tokens,
        )

    async def _tokenize(self, request: web.Request) -> web.Response:
        prompt = parse_prompt(parse_body(await request.read()))
        tokens = [
            int.from_bytes(prompt[start : start + BYTES_PER_TOKEN], "little")
            for start in range(0, len(prompt), BYTES_PER_TOKEN)
        ]
        return _json(
            {
                "count": count_tokens(prompt),
                "max_model_len": self._service.options.max_model_tokens,
                "tokens": tokens,
                "token_strs": None,
            }
        )

    async def _models(self, _: web.Request) -> web.Response:
        model = self._service.options.model
        card = {
            "id": model,
            "object": "model",
            "created": self._created_s,
            "owned_by": "vllm",
            "root": model,
            "parent": None,
            "max_model_len": self._service.options.max_model_tokens,
        }
        return _json({"object": "list", "data": [card]})

    async def _health(self, _: web.Request) -> web.Response:
        """200 while the engine lives: also when it drains, refuses or aborts."""
        return web.Response(status=503 if self._service.runner.dead else 200)

    async def _version(self, _: web.Request) -> web.Response:
        return _json({"version": ENGINE_VERSION})

    async def _load(self, _: web.Request) -> web.Response:
        """As with `--enable-server-load-tracking`."""
        return _json({"server_load": self._service.runner.live})

    async def _metrics(self, _: web.Request) -> web.Response:
        runner = self._service.runner
        text = runner.metrics.render(runner.engine.gauges, runner.engine.stats)
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=1.0.0; charset=utf-8"})

    async def _stats(self, _: web.Request) -> web.Response:
        return _json(self._service.stats())

    async def _fault(self, request: web.Request) -> web.Response:
        fault = parse_fault(parse_body(await request.read()))
        self._service.inject(fault)
        return _json({"kind": fault.kind})


def _usage(ask: Ask, ending: Ending) -> Usage:
    """What was not computed here: proof of a hand-off, unless the parameters still say what P had cached."""
    end = ending.end
    cached = end.cached_tokens + end.external_tokens if end else 0
    params = ask.kv_transfer_params or {}
    if params.get("do_remote_prefill") and type(params.get(CACHED_KEY)) is int:
        cached = params[CACHED_KEY]
    return Usage(prompt_tokens=ask.prompt_tokens, completion_tokens=ending.tokens, cached_tokens=cached)


def _json(content: Any) -> web.Response:
    return web.Response(body=orjson.dumps(content), content_type="application/json")


def _error(message: str, *, kind: str, status: int, param: str | None = None) -> web.Response:
    body = error_object(message, kind=kind, status=status, param=param)
    return web.Response(status=status, body=body, content_type="application/json")
