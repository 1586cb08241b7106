"""The one place that knows the HTTP client: requests and line streams over a unix socket."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from fulcrum_cluster.statuses import error_of
from fulcrum_core.errors import StoreUnavailable

_ANSWER_S = 10.0


class UnixHttp:
    """HTTP over a unix socket, with our errors: what does not answer is `StoreUnavailable`.

    Args:
        path: The socket.
        silence_s: A stream on which nothing came for so long is given up.
    """

    def __init__(self, path: Path, *, silence_s: float) -> None:
        self._path = path
        self._stream_timeout = httpx.Timeout(_ANSWER_S, read=silence_s)
        self._client = httpx.AsyncClient(
            # No TLS on a unix socket: verify=False spares loading certificates at start.
            transport=httpx.AsyncHTTPTransport(
                uds=str(path), verify=False, limits=httpx.Limits(keepalive_expiry=60)
            ),
            base_url="http://fulcrum",
            timeout=_ANSWER_S,
            trust_env=False,
        )

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
        query: Mapping[str, str] | None = None,
    ) -> Any:
        """The JSON answer; an error status raises the error that it says."""
        content = None if body is None else json.dumps(body).encode()
        headers = {"content-type": content_type}
        try:
            answer = await self._client.request(method, path, content=content, headers=headers, params=query)
        except httpx.TransportError as error:
            raise self._unavailable(error) from error
        return self._json(answer)

    @asynccontextmanager
    async def lines(self, path: str, *, query: Mapping[str, str]) -> AsyncIterator[AsyncIterator[bytes]]:
        """The lines of a streamed answer, each as soon as it is whole."""
        try:
            async with self._client.stream("GET", path, params=query, timeout=self._stream_timeout) as answer:
                if answer.is_error:
                    await answer.aread()
                    self._json(answer)
                yield _lines(answer)
        except httpx.TransportError as error:
            raise self._unavailable(error) from error

    async def aclose(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    def _json(self, answer: httpx.Response) -> Any:
        try:
            body = answer.json()
        except ValueError as error:
            raise StoreUnavailable(f"{self._path} answered {answer.status_code} without JSON") from error
        if answer.is_error:
            raise error_of(body)
        return body

    def _unavailable(self, error: httpx.TransportError) -> StoreUnavailable:
        return StoreUnavailable(f"{self._path} does not answer: {error or type(error).__name__}")


async def _lines(answer: httpx.Response) -> AsyncIterator[bytes]:
    held = b""
    async for chunk in answer.aiter_raw():
        *whole, held = (held + chunk).split(b"\n")
        for line in whole:
            yield line
