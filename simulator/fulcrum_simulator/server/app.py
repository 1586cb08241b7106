"""HTTP routes of a simulated engine: those of vLLM, `/simulator/stats` and `/simulator/fault`.

`__main__` serves them. `requests` parses bodies, `service` runs the engine, `responses` and `token_sinks`
answer.
"""

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
from fulcrum_simulator.server.kv_transfer_params import (
    CACHED_TOKENS_KEY,
    build_kv_transfer_params,
    parse_kv_transfer_params,
)
from fulcrum_simulator.server.requests import (
    GenerateRequest,
    RequestRejected,
    check_role,
    parse_body,
    parse_generate_request,
    parse_prompt,
)
from fulcrum_simulator.server.responses import (
    DONE,
    ENGINE_DEAD,
    ResponseTemplate,
    TokenUsage,
    build_vllm_error_event,
    error_object,
)
from fulcrum_simulator.server.service import EngineService
from fulcrum_simulator.server.token_sinks import BufferedTokens, ResponseEnd, StreamedResponse
from fulcrum_simulator.text import BYTES_PER_TOKEN, count_tokens, prompt_digest, split_off_output

ENGINE_VERSION = "0.32.0"
"""The vLLM version whose behaviour is simulated."""
_BODY_BYTES_MAX = 64 * 1024 * 1024
_SIMULATOR_PREFIX = "/simulator/"
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _GenerateCall:
    """A validated generation request with its ids and the constant parts of its response."""

    parsed: GenerateRequest
    request: EngineRequest
    template: ResponseTemplate
    first_index: int
    """Output tokens with which the prompt ends."""


class EngineApp:
    """The HTTP routes of one engine service."""

    def __init__(self, service: EngineService) -> None:
        self._service = service
        self._created_s = int(time.time())

    def build(self) -> web.Application:
        """Build the aiohttp application."""
        app = web.Application(client_max_size=_BODY_BYTES_MAX, middlewares=[self._handle_errors])
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
    async def _handle_errors(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Turn errors into vLLM's error object. A hung engine responds only on the simulator's own routes."""
        if not request.path.startswith(_SIMULATOR_PREFIX):
            await self._service.wait_while_hung()
        try:
            return await handler(request)
        except RequestRejected as refusal:
            return _error_response(
                refusal.message, kind=refusal.kind, status=refusal.status, param=refusal.param
            )
        except InvalidInput as error:
            return _error_response(str(error), kind="BadRequestError", status=400)
        except EngineDead:
            return _error_response(ENGINE_DEAD, kind="InternalServerError", status=500)
        except web.HTTPException as error:
            return _error_response(error.reason, kind=error.reason.replace(" ", ""), status=error.status)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, chat=False)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, chat=True)

    async def _generate(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        service = self._service
        if service.refusing:
            message = "The server is too busy; try a different instance."
            raise RequestRejected(message, status=503, kind="ServiceUnavailableError")
        if service.runner.dead:
            raise EngineDead
        call = self._parse_call(
            parse_body(await request.read()), request.headers.get("X-Request-Id"), chat=chat
        )
        if call.parsed.stream:
            return await self._respond_streamed(request, call)
        return await self._respond(call)

    def _parse_call(self, body: dict[str, Any], request_id: str | None, *, chat: bool) -> _GenerateCall:
        service = self._service
        parsed = parse_generate_request(
            body, chat=chat, model=service.options.model, max_model_tokens=service.options.max_model_tokens
        )
        check_role(parsed, service.options.role)
        call_id = request_id or uuid.uuid4().hex
        response_id = f"chatcmpl-{call_id}" if chat else f"cmpl-{call_id}"
        before_output, first_index = split_off_output(parsed.prompt)
        return _GenerateCall(
            parsed=parsed,
            request=EngineRequest(
                id=f"{response_id}{'' if chat else '-0'}-{uuid.uuid4().hex[:8]}",
                arrival_s=service.runner.now_s(),
                prompt_tokens=parsed.prompt_tokens,
                max_tokens=parsed.max_tokens,
                digest=prompt_digest(before_output),
                block_hashes=block_hashes(
                    parsed.prompt,
                    block_bytes=service.options.profile.block_size * BYTES_PER_TOKEN,
                    salt=parsed.cache_salt.encode()[:64],
                ),
                priority=parsed.priority,
                kv_transfer=parse_kv_transfer_params(parsed.kv_transfer_params),
            ),
            template=ResponseTemplate(
                response_id=response_id, model=parsed.model, created_s=int(time.time()), chat=chat
            ),
            first_index=first_index,
        )

    async def _respond(self, call: _GenerateCall) -> web.Response:
        sink = BufferedTokens(first_index=call.first_index)
        self._service.submit(call.request, sink)
        try:
            ending = await sink.ending
        finally:
            self._service.runner.abort(call.request.id)
        body = call.template.format_response(
            sink.text,
            finish_reason=ending.reason,
            usage=_measure_usage(call.parsed, ending),
            kv_transfer_params=self._kv_transfer_params(ending),
        )
        return web.Response(body=body, content_type="application/json")

    async def _respond_streamed(self, request: web.Request, call: _GenerateCall) -> web.StreamResponse:
        """Stream a response.

        The step loop writes the tokens to the transport; this handler writes the end.
        """
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        transport = request.transport
        if transport is None:
            return response
        sink = StreamedResponse(
            call.template, transport, max_tokens=call.parsed.max_tokens, first_index=call.first_index
        )
        self._service.submit(call.request, sink)
        try:
            ending = await sink.ending
        except EngineDead:
            tail = build_vllm_error_event(ENGINE_DEAD, kind="InternalServerError", status=500)
        else:
            tail = (
                call.template.format_usage(_measure_usage(call.parsed, ending))
                if call.parsed.include_usage
                else b""
            )
        finally:
            self._service.runner.abort(call.request.id)
        await response.write(tail + DONE)
        return response

    def _kv_transfer_params(self, ending: ResponseEnd) -> dict[str, Any] | None:
        end = ending.end
        if end is None or end.export is None:
            return None
        return build_kv_transfer_params(
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
        return _json_response(
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
        return _json_response({"object": "list", "data": [card]})

    async def _health(self, _: web.Request) -> web.Response:
        """200 while the engine lives, also while it drains, refuses or aborts requests."""
        return web.Response(status=503 if self._service.runner.dead else 200)

    async def _version(self, _: web.Request) -> web.Response:
        return _json_response({"version": ENGINE_VERSION})

    async def _load(self, _: web.Request) -> web.Response:
        """Requests in flight, as under `--enable-server-load-tracking`."""
        return _json_response({"server_load": self._service.runner.live_requests})

    async def _metrics(self, _: web.Request) -> web.Response:
        runner = self._service.runner
        text = runner.metrics.render(runner.engine.gauges, runner.engine.stats)
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=1.0.0; charset=utf-8"})

    async def _stats(self, _: web.Request) -> web.Response:
        return _json_response(self._service.read_stats())

    async def _fault(self, request: web.Request) -> web.Response:
        fault = parse_fault(parse_body(await request.read()))
        self._service.inject_fault(fault)
        return _json_response({"kind": fault.kind})


def _measure_usage(parsed: GenerateRequest, ending: ResponseEnd) -> TokenUsage:
    """Count the prompt tokens that this engine did not compute as cached, which verifies a KV transfer.

    If the client leaves `remote_prefill_cached_tokens` in the parameters, the prefill instance's count is
    reported instead, as by vLLM.
    """
    end = ending.end
    cached = end.cached_tokens + end.external_tokens if end else 0
    params = parsed.kv_transfer_params or {}
    if params.get("do_remote_prefill") and type(params.get(CACHED_TOKENS_KEY)) is int:
        cached = params[CACHED_TOKENS_KEY]
    return TokenUsage(
        prompt_tokens=parsed.prompt_tokens, completion_tokens=ending.tokens, cached_tokens=cached
    )


def _json_response(content: Any) -> web.Response:
    return web.Response(body=orjson.dumps(content), content_type="application/json")


def _error_response(message: str, *, kind: str, status: int, param: str | None = None) -> web.Response:
    body = error_object(message, kind=kind, status=status, param=param)
    return web.Response(status=status, body=body, content_type="application/json")
