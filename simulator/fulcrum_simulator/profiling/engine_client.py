"""Talks to one engine over vLLM's HTTP API, and records when each token arrives.

Prompts are lists of token ids, so that their length is exact with any tokeniser; no two of them begin alike,
so that no prefix cache saves work; another seed makes others. Whatever an engine does wrong ends as one
`EngineUnusable`. `measure` decides what is sent and how often.
"""

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp

from fulcrum_core.errors import FulcrumError

CONNECT_TIMEOUT_S = 10.0
RESPONSE_TIMEOUT_S = 120.0
"""Longest time of an engine for a whole response, or of a stream from one token to the next."""
MODEL_TOKENS_MAX, KV_TOKENS_MAX = 10_000_000, 2**30
"""Larger limits of an engine are not believed: prompts of their size are made."""
_PAGE_BYTES_MAX = 1 << 20
_BODY_BYTES_MAX = 64 << 20
KEEP_ALIVE_S = 2.0
"""A connection that was idle for so many seconds is not used again. vLLM closes it after 5: a request that
is sent at that moment would fail."""
_EVENT_BYTES_MAX = 1 << 20
_MESSAGE_LENGTH_MAX = 200
_CAUSE_LENGTH_MAX = 400
_CACHE_CONFIG = "\nvllm:cache_config_info{"
_BLOCK_SIZE, _BLOCKS = re.compile(r'\bblock_size="(\d{1,9})"'), re.compile(r'\bnum_gpu_blocks="(\d{1,9})"')
_CREDENTIALS = re.compile(r"(\w+://)?\S+@")
# Ids that every vocabulary has, and that no usual tokeniser reserves.
_TOKEN_IDS = range(16, 240)


def hide_credentials(text: str) -> str:
    """Replace name and password of the URLs in a text."""
    return _CREDENTIALS.sub(r"\1***@", text)


class EngineUnusable(FulcrumError):
    """An engine cannot be reached, or does not do what a measurement needs. One line: address and cause."""

    def __init__(self, url: str, cause: str) -> None:
        super().__init__(hide_credentials(f"{url}: {cause[:_CAUSE_LENGTH_MAX]}"))


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine says of itself."""

    model: str
    max_model_tokens: int
    kv_tokens: int
    block_size: int


@dataclass(slots=True)
class TokenTimes:
    """When a request was sent, and when each of its tokens arrived, in seconds of the event loop.

    `on_token` is called after each token. `cached_tokens`: prompt tokens that the engine says it did not
    compute; None if it does not say.
    """

    sent_s: float = 0.0
    tokens_s: list[float] = field(default_factory=list)
    on_token: Callable[[], None] = lambda: None
    cached_tokens: int | None = None


class EngineClient:
    """One engine. Use as `async with EngineClient.open(url, seed=seed)`."""

    def __init__(self, url: str, session: aiohttp.ClientSession, *, seed: int) -> None:
        self.url = url.rstrip("/")
        self._session = session
        self._rng = random.Random(seed)
        self._prompts = 0

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str, *, seed: int) -> AsyncIterator[Self]:
        """Yield a client; the connections are closed afterwards.

        The prompts follow from `seed`: an engine may have those of an earlier seed in its prefix cache.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            yield cls(url, session, seed=seed)

    def make_prompt(self, tokens: int) -> list[int]:
        """Return a prompt of that length that begins like no other of this client."""
        self._prompts += 1
        start, number = [], self._prompts + self._rng.randrange(2**16) * 2**16
        for _ in range(4):
            number, digit = divmod(number, len(_TOKEN_IDS))
            start.append(_TOKEN_IDS[digit])
        return [*start, *self._rng.choices(_TOKEN_IDS, k=max(0, tokens - len(start)))][:tokens]

    async def read_limits(self) -> EngineLimits:
        """Read model, context length and KV cache of the engine.

        Raises:
            EngineUnusable: if the engine does not report them as vLLM does.
        """
        models = await self._get("/v1/models")
        metrics = await self._get("/metrics")
        try:
            card = json.loads(models)["data"][0]
            block_size, blocks = _read_cache_config(metrics)
            limits = EngineLimits(
                str(card["id"]), int(card["max_model_len"]), block_size * blocks, block_size
            )
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
            raise EngineUnusable(self.url, "is not vLLM: no max_model_len or cache_config_info") from None
        for name, tokens, most in (
            ("max_model_len", limits.max_model_tokens, MODEL_TOKENS_MAX),
            ("KV cache", limits.kv_tokens, KV_TOKENS_MAX),
        ):
            if not 1 <= tokens <= most:
                raise EngineUnusable(
                    self.url, f"{name} ({str(tokens)[:20]} tokens) is not from 1 to {most:,}"
                )
        return limits

    async def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a completion that does not stream, and return the response.

        Raises:
            EngineUnusable: if it fails.
        """
        async with self._limit_time("does not respond"), self._post(body) as response:
            raw = await self._read_body(response)
        try:
            message = json.loads(raw)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise EngineUnusable(self.url, "responded with something else than a JSON object")
        return message

    async def stream(self, body: Mapping[str, Any], times: TokenTimes) -> None:
        """Send a completion and record in `times` when its tokens arrive, until all have.

        Raises:
            EngineUnusable: if it fails, or produces another number of tokens than `max_tokens`.
        """
        expected = int(body["max_tokens"])
        streaming = {**body, "stream": True, "stream_options": {"include_usage": True}}
        times.sent_s = asyncio.get_running_loop().time()
        reader = _EventReader(times)
        async with self._limit_time("sends no token") as limit, self._post(streaming) as response:
            async for data in response.content.iter_any():
                before, now_s = len(times.tokens_s), asyncio.get_running_loop().time()
                problem = reader.feed(data, now_s)
                if problem:
                    raise EngineUnusable(self.url, problem)
                if len(times.tokens_s) > expected:
                    raise EngineUnusable(self.url, f"sends more than the {expected} tokens asked for")
                if len(times.tokens_s) > before:
                    limit.reschedule(now_s + RESPONSE_TIMEOUT_S)
        problem = reader.find_problem(prompt_tokens=len(body["prompt"]), tokens=expected)
        if problem:
            raise EngineUnusable(self.url, problem)

    @asynccontextmanager
    async def _limit_time(self, failure: str) -> AsyncIterator[asyncio.Timeout]:
        """End the block after `RESPONSE_TIMEOUT_S`, unless the yielded timeout is scheduled anew."""
        try:
            async with asyncio.timeout(RESPONSE_TIMEOUT_S) as limit:
                yield limit
        except TimeoutError:
            raise EngineUnusable(self.url, f"{failure} for {RESPONSE_TIMEOUT_S:g} s") from None

    @asynccontextmanager
    async def _post(self, body: Mapping[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
        fixed = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        async with self._request("POST", "/v1/completions", json={**fixed, **body}) as response:
            if response.status != 200:
                raise EngineUnusable(
                    self.url, f"status {response.status}: {_message(await self._read_body(response))}"
                )
            yield response

    async def _get(self, path: str) -> str:
        async with self._limit_time("does not respond"), self._request("GET", path) as response:
            text = (await self._read_body(response, most=_PAGE_BYTES_MAX)).decode(errors="replace")
            if response.status != 200:
                raise EngineUnusable(self.url, f"{path} has status {response.status}")
            return text

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, **arguments: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            async with self._session.request(method, self.url + path, **arguments) as response:
                yield response
        except (aiohttp.ClientError, OSError, ValueError) as error:
            cause = str(error).splitlines()[0] if str(error) else type(error).__name__
            happened = "broke off" if isinstance(error, aiohttp.ClientPayloadError) else "cannot be reached"
            raise EngineUnusable(self.url, f"{happened}: {cause}") from error

    async def _read_body(self, response: aiohttp.ClientResponse, *, most: int = _BODY_BYTES_MAX) -> bytes:
        raw = bytearray()
        async for data in response.content.iter_any():
            raw += data
            if len(raw) > most:
                raise EngineUnusable(self.url, f"sends more than {most:,} bytes")
        return bytes(raw)


def _read_cache_config(metrics: str) -> tuple[int, int]:
    """Return size and number of the KV blocks; raises ValueError if the page does not say."""
    _, found, rest = ("\n" + metrics).partition(_CACHE_CONFIG)
    line = rest.partition("\n")[0]
    block_size, blocks = _BLOCK_SIZE.search(line), _BLOCKS.search(line)
    if not found or block_size is None or blocks is None:
        raise ValueError("no cache_config_info")
    return int(block_size[1]), int(blocks[1])


class _EventReader:
    """Reads the server-sent events of one response, cut at any byte."""

    def __init__(self, times: TokenTimes) -> None:
        self._times = times
        self._buffer = b""
        self._usage: dict[str, Any] = {}

    def feed(self, data: bytes, now_s: float) -> str:
        """Record the tokens in `data`; returns the problem if there is one."""
        *events, self._buffer = (self._buffer + data).split(b"\n\n")
        if len(self._buffer) > _EVENT_BYTES_MAX:
            return "sends an event that does not end"
        return next(filter(None, (self._read(event, now_s) for event in events)), "")

    def _read(self, event: bytes, now_s: float) -> str:
        payload = event.strip().removeprefix(b"data:").strip()
        if not payload or payload == b"[DONE]" or payload.startswith(b":"):  # a comment keeps it open
            return ""
        try:
            message = json.loads(payload)
            if "error" in message:
                return f"ended the stream: {_message(payload)}"
            self._usage = dict(message.get("usage") or self._usage)
            tokens = sum(map(_count_tokens, message.get("choices") or ()))
        except (ValueError, TypeError, AttributeError, RecursionError):
            return "sends an event that is not a completion"
        if tokens:
            self._times.tokens_s += [now_s] * tokens
            self._times.on_token()
        return ""

    def find_problem(self, *, prompt_tokens: int, tokens: int) -> str:
        """Return how the finished response differs from what was asked for; empty if it does not."""
        counted = self._usage.get("prompt_tokens"), self._usage.get("completion_tokens")
        if counted != (prompt_tokens, tokens):
            return f"counted {counted[0]} and {counted[1]} tokens instead of {prompt_tokens} and {tokens}"
        if not self._times.tokens_s:
            return "sent no token"
        details = self._usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        self._times.cached_tokens = cached if isinstance(cached, int) else None
        return ""


def _count_tokens(choice: Mapping[str, Any]) -> int:
    """Return the tokens of one choice of an event: several, if the client was slow. Without ids it is one."""
    token_ids = choice.get("token_ids")
    return 1 if token_ids is None else len(token_ids)


def _message(raw: bytes) -> str:
    """Return the text of a vLLM error, in one short line."""
    try:
        error = json.loads(raw)
        error = error.get("error", error)
        text = str(error.get("message", error))
    except (ValueError, AttributeError, RecursionError):
        text = raw.decode(errors="replace")
    return " ".join(text.split())[:_MESSAGE_LENGTH_MAX] or "no message"
