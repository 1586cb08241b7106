"""The one place that knows the HTTP client: requests and line streams to a socket or an API server."""

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import httpx

from fulcrum_cluster.access import Access
from fulcrum_cluster.bucket import Bucket
from fulcrum_cluster.statuses import error_of
from fulcrum_core.errors import FulcrumError, StoreUnavailable

_ANSWER_S = 10.0
_HEAD_S = 5.0  # of a stream: an API server that starts may take a watch and never begin with it
_RATE, _BURST = 100.0, 200  # far above what any program of ours needs; client-go's 5 and 10 are below it
_BUSY_TRIES, _BUSY_WAIT_S = 3, 2.0

_FAILURES = (httpx.RequestError, ssl.SSLError)
"""What keeps an answer from coming; httpx passes on as they are the errors of a TLS stream that is broken."""

_Call = Callable[..., Awaitable[httpx.Response]]
"""A request that lacks its headers only."""

# A peer that is gone without a word is noticed within 20 s: Linux probes an idle connection, and gives up on
# one whose data nobody takes.
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (
            ("TCP_KEEPIDLE", 10),
            ("TCP_KEEPINTVL", 3),
            ("TCP_KEEPCNT", 3),
            ("TCP_USER_TIMEOUT", 20_000),
        )
        if hasattr(socket, name)
    ),
)


class Http:
    """HTTP with our errors: what does not answer is `StoreUnavailable`.

    Args:
        access: Where to, and as whom.
        silence_s: A stream on which nothing came for so long is given up.
        program: What asks, for the server's logs and as field manager of writes that name none.
    """

    def __init__(self, access: Access, *, silence_s: float, program: str) -> None:
        self._access = access
        self._stream_timeout = httpx.Timeout(_ANSWER_S, read=silence_s)
        self._bucket = None if access.socket else Bucket(_RATE, _BURST)
        self._extensions = {"sni_hostname": access.server_name} if access.server_name else {}
        self._client = httpx.AsyncClient(
            transport=_transport(access),
            base_url=access.url,
            timeout=_ANSWER_S,
            trust_env=False,
            headers={"user-agent": program, "accept": "application/json"},
        )

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
        query: Mapping[str, str] | None = None,
        plain: bool = False,
    ) -> Any:
        """The JSON answer; an error status raises the error that it says. A busy server is asked again.

        Args:
            method: Of HTTP.
            path: Below the server's address.
            body: What is sent.
            content_type: Of what is sent.
            query: Behind the path.
            plain: Give an answer that is no JSON as text instead of refusing it.
        """
        content = None if body is None else json.dumps(body).encode()
        headers = {} if body is None else {"content-type": content_type}
        if plain:
            headers["accept"] = "application/json, */*"  # the keys of tokens are JSON of a type of their own
        call = partial(
            self._client.request, method, path, content=content, params=query, extensions=self._extensions
        )
        for tries_left in reversed(range(_BUSY_TRIES)):
            answer = await self._answer(call, headers)
            wait_s = _busy_for_s(answer)
            if wait_s is None or wait_s > _BUSY_WAIT_S or not tries_left:
                break
            await asyncio.sleep(wait_s)
        if plain and not answer.is_error and "json" not in answer.headers.get("content-type", ""):
            return answer.text
        return self._json(answer, body)

    @asynccontextmanager
    async def lines(self, path: str, *, query: Mapping[str, str]) -> AsyncIterator[AsyncIterator[bytes]]:
        """The lines of a streamed answer, each as soon as it is whole."""
        headers = await self._credentials()
        stream = self._client.stream(
            "GET",
            path,
            params=query,
            headers=headers,
            timeout=self._stream_timeout,
            extensions=self._extensions,
        )
        try:
            async with AsyncExitStack() as open_streams:
                answer = await self._begun(open_streams, stream)
                if answer.is_error:
                    self._heed(answer)
                    await answer.aread()
                    self._json(answer, None)
                yield _lines(answer)
        except _FAILURES as error:
            raise self._unavailable(error) from error

    async def _begun(
        self, open_streams: AsyncExitStack, stream: AbstractAsyncContextManager[httpx.Response]
    ) -> httpx.Response:
        """The head of a stream, within `_HEAD_S`."""
        try:
            async with asyncio.timeout(_HEAD_S):
                return await open_streams.enter_async_context(stream)
        except TimeoutError as error:
            raise StoreUnavailable(f"{self._access.words} does not begin to answer") from error

    async def aclose(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def _answer(self, call: _Call, headers: Mapping[str, str]) -> httpx.Response:
        answer = await self._ask(call, headers)
        if answer.status_code == httpx.codes.UNAUTHORIZED and self._access.token:
            self._heed(answer)  # a token that was renewed a moment ago deserves a second try
            answer = await self._ask(call, headers)
        return answer

    async def _ask(self, call: _Call, headers: Mapping[str, str]) -> httpx.Response:
        headers = {**headers, **await self._credentials()}
        try:
            return await call(headers=headers)
        except _FAILURES as error:
            raise self._unavailable(error) from error

    async def _credentials(self) -> dict[str, str]:
        if self._bucket:
            await self._bucket.take()
        try:
            header = await self._access.token.header() if self._access.token else None
        except OSError as error:
            raise StoreUnavailable(f"{error.filename} cannot be read: {error.strerror}") from error
        return {"authorization": header} if header else {}

    def _heed(self, answer: httpx.Response) -> None:
        if answer.status_code == httpx.codes.UNAUTHORIZED and self._access.token:
            self._access.token.refused()

    def _json(self, answer: httpx.Response, sent: Mapping[str, Any] | None) -> Any:
        try:
            body = answer.json()
        except ValueError as error:
            raise self._unreadable(answer) from error
        if answer.is_error:
            raise self._refusal(answer, body, sent)
        return body

    def _refusal(self, answer: httpx.Response, body: Any, sent: Mapping[str, Any] | None) -> FulcrumError:
        status = body if isinstance(body, Mapping) else {}
        error = error_of({"code": answer.status_code, **status}, sent)
        if isinstance(error, StoreUnavailable):
            error.retry_after_s = error.retry_after_s or _retry_after_s(answer)
        return error

    def _unreadable(self, answer: httpx.Response) -> FulcrumError:
        message = f"{self._access.words} answered {answer.status_code} without JSON"
        if answer.status_code == httpx.codes.NOT_FOUND:
            return error_of(
                {
                    "code": 404,
                    "message": f"{answer.request.url.path} is not there: is its CRD installed?",
                }
            )
        return StoreUnavailable(message, retry_after_s=_retry_after_s(answer))

    def _unavailable(self, error: Exception) -> StoreUnavailable:
        return StoreUnavailable(f"{self._access.words} does not answer: {error or type(error).__name__}")


def _transport(access: Access) -> httpx.AsyncHTTPTransport:
    # Each watch holds a connection, so there is no upper bound. Without TLS, verify=False spares loading
    # certificates at start; with it, the context says what to verify.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=20, keepalive_expiry=60)
    if access.socket:
        return httpx.AsyncHTTPTransport(uds=str(access.socket), verify=False, limits=limits)
    return httpx.AsyncHTTPTransport(
        verify=access.tls or False,
        limits=limits,
        proxy=access.proxy or None,
        socket_options=_KEEPALIVE,
        trust_env=False,
    )


def _busy_for_s(answer: httpx.Response) -> float | None:
    """How long a server that did not even look at the request (429) wants to be left alone."""
    if answer.status_code != httpx.codes.TOO_MANY_REQUESTS:
        return None
    return _retry_after_s(answer)


def _retry_after_s(answer: httpx.Response) -> float | None:
    said = answer.headers.get("retry-after", "")
    return float(said) if said.isdecimal() else None


async def _lines(answer: httpx.Response) -> AsyncIterator[bytes]:
    held: list[bytes] = []
    async for chunk in answer.aiter_raw():
        first, *rest = chunk.split(b"\n")
        held.append(first)
        for part in rest:
            yield b"".join(held)
            held = [part]
