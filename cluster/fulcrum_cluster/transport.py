"""HTTP requests and line streams to a store's socket or an API server; every failure is one of our errors.

`client` builds on it. No other module of the room uses httpx but `router_client`.
"""

import asyncio
import json
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import httpx

from fulcrum_cluster.client_config import ClientConfig
from fulcrum_cluster.error_status import error_from_status
from fulcrum_cluster.token_bucket import TokenBucket
from fulcrum_core.errors import FulcrumError, StoreUnavailable

_RESPONSE_TIMEOUT_S = 10.0
_RESPONSE_HEADERS_TIMEOUT_S = (
    5.0  # of a stream: an API server that starts may take a watch and never begin with it
)
_REQUESTS_PER_S, _BURST_REQUESTS = (
    100.0,
    200,
)  # far above what any program of ours needs; client-go's 5 and 10 are below it
_TRIES_MAX, _RETRY_WAIT_MAX_S = 3, 2.0

_CONNECTION_ERRORS = (httpx.RequestError, ssl.SSLError)
"""Errors of a connection. httpx passes the errors of a broken TLS stream on unchanged."""

_Call = partial[Coroutine[Any, Any, httpx.Response]]
"""A request without its headers; its first argument is the method."""
"""A prepared request, to which headers are added for each attempt."""

# A peer that vanished without closing the connection is noticed within 20 s: Linux probes idle connections
# and gives up on unacknowledged data.
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


class HttpClient:
    """HTTP client with our errors: a server that does not respond is `StoreUnavailable`.

    Args:
        config: Address and credentials.
        idle_timeout_s: Longest pause of a stream before it is closed.
        program: User-Agent, and the field manager of writes that name none.
    """

    def __init__(self, config: ClientConfig, *, idle_timeout_s: float, program: str) -> None:
        self._config = config
        self.responses = Counter[tuple[str, int]]()
        """Responses by method and status, and requests without a response, with status 0."""
        self._stream_timeout = httpx.Timeout(_RESPONSE_TIMEOUT_S, read=idle_timeout_s)
        self._bucket = None if config.socket else TokenBucket(_REQUESTS_PER_S, _BURST_REQUESTS)
        self._extensions = {"sni_hostname": config.server_name} if config.server_name else {}
        self._client = httpx.AsyncClient(
            transport=_transport(config),
            base_url=config.url,
            timeout=_RESPONSE_TIMEOUT_S,
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
        allow_text: bool = False,
    ) -> Any:
        """Send a request and return the JSON response. A response of 429 is retried.

        Args:
            method: HTTP method.
            path: Path below the server's address.
            body: Object to send.
            content_type: Content type of the body.
            query: Query parameters.
            allow_text: Return a response that is not JSON as text.

        Raises:
            FulcrumError: the error of the response's Status object.
        """
        content = None if body is None else json.dumps(body).encode()
        headers = {} if body is None else {"content-type": content_type}
        if allow_text:
            headers["accept"] = "application/json, */*"  # the token keys have their own JSON type
        call = partial(
            self._client.request, method, path, content=content, params=query, extensions=self._extensions
        )
        for tries_left in reversed(range(_TRIES_MAX)):
            response = await self._send_with_token_retry(call, headers)
            wait_s = _too_many_requests_wait_s(response)
            if wait_s is None or wait_s > _RETRY_WAIT_MAX_S or not tries_left:
                break
            await asyncio.sleep(wait_s)
        if allow_text and not response.is_error and "json" not in response.headers.get("content-type", ""):
            return response.text
        return self._parse_json(response, body)

    @asynccontextmanager
    async def stream_lines(
        self, path: str, *, query: Mapping[str, str]
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open a streamed response and yield its lines, each as soon as it is complete."""
        headers = await self._authorization_headers()
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
                response = await self._open_stream(open_streams, stream)
                self.responses["WATCH", response.status_code] += 1
                if response.is_error:
                    self._invalidate_refused_token(response)
                    await response.aread()
                    self._parse_json(response, None)
                yield _split_lines(response)
        except _CONNECTION_ERRORS as error:
            raise self._unavailable_error(error) from error

    async def _open_stream(
        self, open_streams: AsyncExitStack, stream: AbstractAsyncContextManager[httpx.Response]
    ) -> httpx.Response:
        """Wait for the response headers of a stream, for at most `_RESPONSE_HEADERS_TIMEOUT_S`."""
        try:
            async with asyncio.timeout(_RESPONSE_HEADERS_TIMEOUT_S):
                return await open_streams.enter_async_context(stream)
        except TimeoutError as error:
            raise StoreUnavailable(f"{self._config.display_name} sends no response headers") from error

    async def aclose(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def _send_with_token_retry(self, call: _Call, headers: Mapping[str, str]) -> httpx.Response:
        response = await self._send(call, headers)
        if response.status_code == httpx.codes.UNAUTHORIZED and self._config.token:
            self._invalidate_refused_token(response)  # the token may have just been renewed: try once more
            response = await self._send(call, headers)
        return response

    async def _send(self, call: _Call, headers: Mapping[str, str]) -> httpx.Response:
        headers = {**headers, **await self._authorization_headers()}
        try:
            response = await call(headers=headers)
        except _CONNECTION_ERRORS as error:
            self.responses[str(call.args[0]), 0] += 1
            raise self._unavailable_error(error) from error
        self.responses[response.request.method, response.status_code] += 1
        return response

    async def _authorization_headers(self) -> dict[str, str]:
        if self._bucket:
            await self._bucket.acquire()
        try:
            header = await self._config.token.authorization_header() if self._config.token else None
        except OSError as error:
            raise StoreUnavailable(f"{error.filename} cannot be read: {error.strerror}") from error
        return {"authorization": header} if header else {}

    def _invalidate_refused_token(self, response: httpx.Response) -> None:
        if response.status_code == httpx.codes.UNAUTHORIZED and self._config.token:
            self._config.token.invalidate()

    def _parse_json(self, response: httpx.Response, sent: Mapping[str, Any] | None) -> Any:
        try:
            body = response.json()
        except ValueError as error:
            raise self._not_json_error(response) from error
        if response.is_error:
            raise self._refusal(response, body, sent)
        return body

    def _refusal(self, response: httpx.Response, body: Any, sent: Mapping[str, Any] | None) -> FulcrumError:
        status = body if isinstance(body, Mapping) else {}
        error = error_from_status({"code": response.status_code, **status}, sent)
        if isinstance(error, StoreUnavailable):
            error.retry_after_s = error.retry_after_s or _retry_after_s(response)
        return error

    def _not_json_error(self, response: httpx.Response) -> FulcrumError:
        message = f"{self._config.display_name} responded with {response.status_code} and no JSON"
        if response.status_code == httpx.codes.NOT_FOUND:
            return error_from_status(
                {
                    "code": 404,
                    "message": f"{response.request.url.path} does not exist: is its CRD installed?",
                }
            )
        return StoreUnavailable(message, retry_after_s=_retry_after_s(response))

    def _unavailable_error(self, error: Exception) -> StoreUnavailable:
        cause = str(error) or type(error).__name__
        return StoreUnavailable(f"{self._config.display_name} does not respond: {cause}", cause=cause)


def _transport(config: ClientConfig) -> httpx.AsyncHTTPTransport:
    # Each watch occupies a connection, so there is no upper bound. Without TLS, verify=False avoids loading
    # certificates at start.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=20, keepalive_expiry=60)
    if config.socket:
        return httpx.AsyncHTTPTransport(uds=str(config.socket), verify=False, limits=limits)
    return httpx.AsyncHTTPTransport(
        verify=config.tls or False,
        limits=limits,
        proxy=config.proxy or None,
        socket_options=_KEEPALIVE,
        trust_env=False,
    )


def _too_many_requests_wait_s(response: httpx.Response) -> float | None:
    """Pause that an overloaded server requests (429); None if it is not overloaded or names no pause."""
    if response.status_code != httpx.codes.TOO_MANY_REQUESTS:
        return None
    return _retry_after_s(response)


def _retry_after_s(response: httpx.Response) -> float | None:
    seconds = response.headers.get("retry-after", "")
    return float(seconds) if seconds.isdecimal() else None


async def _split_lines(response: httpx.Response) -> AsyncIterator[bytes]:
    line_parts: list[bytes] = []
    async for chunk in response.aiter_raw():
        first, *rest = chunk.split(b"\n")
        line_parts.append(first)
        for part in rest:
            yield b"".join(line_parts)
            line_parts = [part]
