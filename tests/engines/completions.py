"""Requests to real engines, and the token ids of their responses. Every test of level 5 sends with it.

It goes through the router or directly to an engine; the expected tokens are those of one engine alone.
"""

import asyncio
import json
import random
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from tests.engines.services import MODEL

_WORDS = (
    "quick",
    "brown",
    "fox",
    "jumps",
    "lazy",
    "dog",
    "seven",
    "pilots",
    "measure",
    "tired",
    "clocks",
    "rivers",
)


Route = tuple[str | None, str | None]
"""Prefill and decode instance; None where the response names none."""


class BrokenStreamError(Exception):
    """A stream ended without `[DONE]`; the message is its last event."""


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A completion or chat request, without its URL."""

    prompt: str
    tokens: int = 12
    chat: bool = False
    stream: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """Path of the API for this request."""
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self) -> dict[str, Any]:
        """Return the JSON body: greedy sampling, with token ids in the response."""
        prompt = (
            {"messages": [{"role": "user", "content": self.prompt}]} if self.chat else {"prompt": self.prompt}
        )
        return {
            "model": MODEL,
            **prompt,
            "max_tokens": self.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": self.stream,
            **self.extra,
        }


@dataclass(frozen=True, slots=True)
class CompletionResponse:
    """A response, with the token ids of all its events."""

    status: int
    tokens: tuple[int, ...]
    headers: dict[str, str]
    usage: dict[str, Any] | None = None
    text: str = ""

    @property
    def prefill(self) -> str | None:
        """Name of the prefill instance; None if decode computed the prompt."""
        return self.headers.get("x-fulcrum-prefill")

    @property
    def decode(self) -> str | None:
        """Name of the decode instance."""
        return self.headers.get("x-fulcrum-decode")

    @property
    def route(self) -> Route:
        """Prefill and decode instance."""
        return self.prefill, self.decode

    @property
    def local_prefill_reason(self) -> str | None:
        """Why decode computed the prompt itself; None if it did not."""
        return self.headers.get("x-fulcrum-local-prefill")


def generate_prompts(rng: random.Random, count: int, words: tuple[int, int] = (10, 120)) -> list[str]:
    """Return prompts that begin differently, so that none shares cached blocks with another."""
    lengths = [rng.randint(*words) for _ in range(count)]
    return [f"{rng.random()} " + " ".join(rng.choices(_WORDS, k=length)) for length in lengths]


def generate_mixed_requests(rng: random.Random, count: int) -> list[CompletionRequest]:
    """Return chat and completion requests, streaming and not, in turn."""
    return [
        CompletionRequest(prompt, rng.randint(8, 56), chat=number % 2 == 1, stream=number % 4 > 1)
        for number, prompt in enumerate(generate_prompts(rng, count))
    ]


async def send(
    client: httpx.AsyncClient, url: str, request: CompletionRequest, *, begun: asyncio.Event | None = None
) -> CompletionResponse:
    """Send the request and return the whole response; `begun` is set at the first token of a stream.

    Raises:
        BrokenStreamError: a stream ended without `[DONE]`, or with an error event.
    """
    if request.stream:
        return await _send_streaming(client, url, request, begun or asyncio.Event())
    response = await client.post(url + request.path, json=request.body())
    headers = dict(response.headers)
    if response.status_code != httpx.codes.OK:
        return CompletionResponse(response.status_code, (), headers, text=response.text)
    body = response.json()
    return CompletionResponse(
        200, tuple(body["choices"][0]["token_ids"] or ()), headers, body["usage"], response.text
    )


async def _send_streaming(
    client: httpx.AsyncClient, url: str, request: CompletionRequest, begun: asyncio.Event
) -> CompletionResponse:
    tokens: list[int] = []
    usage, last = None, ""
    async with client.stream("POST", url + request.path, json=request.body()) as response:
        headers = dict(response.headers)
        if response.status_code != httpx.codes.OK:
            return CompletionResponse(
                response.status_code, (), headers, text=(await response.aread()).decode()
            )
        async for last in iterate_events(response):
            if last == "[DONE]":
                continue  # the end of the body follows
            event = json.loads(last)
            if "error" in event:
                raise BrokenStreamError(last)
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                tokens += choice.get("token_ids") or ()
            if tokens:
                begun.set()
    if last != "[DONE]":
        raise BrokenStreamError(last)
    return CompletionResponse(200, tuple(tokens), headers, usage)


async def iterate_events(response: httpx.Response) -> AsyncIterator[str]:
    """Yield the data of each SSE event. Splits at line feeds only: text may contain other separators."""
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                yield line.removeprefix(b"data: ").decode()


def with_cache_salt(request: CompletionRequest, **extra: Any) -> CompletionRequest:
    """Return the request with a new cache salt, so that no cache holds any of its blocks."""
    return replace(request, extra={**request.extra, "cache_salt": secrets.token_hex(8), **extra})


async def compute_reference_tokens(
    client: httpx.AsyncClient, engine_url: str, request: CompletionRequest
) -> tuple[int, ...]:
    """Return the tokens of one engine that computes the whole request itself."""
    return (await send(client, engine_url, with_cache_salt(replace(request, stream=False)))).tokens


async def request_prefill(
    client: httpx.AsyncClient, engine_url: str, request: CompletionRequest
) -> dict[str, Any]:
    """Return the KV transfer parameters of an engine's response to a prefill request like the router's."""
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    body = {**replace(request, tokens=1, stream=False).body(), "kv_transfer_params": params}
    response_body: dict[str, Any] = (await client.post(engine_url + request.path, json=body)).json()
    return dict(response_body["kv_transfer_params"])


async def send_until_routed(
    route: Route,
    send: Callable[[CompletionRequest], Awaitable[CompletionResponse]],
    request: CompletionRequest,
    right: tuple[int, ...],
) -> None:
    """Send the same request until this route served it; each response must have the expected tokens."""
    took: Route | None = None
    while took != route:
        response = await send(with_cache_salt(request))
        assert (response.status, response.tokens) == (200, right)
        took = response.route
