"""Send a request to an engine and wait for its response; the legs, canaries and probes do so.

A request is sent again only to the same engine, and only if that had closed a reused connection. Another
engine is the journey's decision.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from fulcrum_router.http1.failures import Failure, LegFailed
from fulcrum_router.http1.framing import CHUNKED, FramingError, ResponseHead, dechunk
from fulcrum_router.http1.inline_task import Completion
from fulcrum_router.http1.upstream import (
    ConnectionPool,
    EngineConnection,
    ResponseHandler,
    ResponseTooLarge,
)

MAX_RESPONSE_BYTES = 8 * 1024 * 1024
"""Limit of a response that is buffered whole."""


class BufferedResponse(Completion[bytes]):
    """Collects a whole response and completes with its content."""

    __slots__ = ("_body_bytes", "_body_parts", "content", "head", "retryable")

    def __init__(self, *, retryable: bool) -> None:
        Completion.__init__(self)  # super() costs a lookup
        self.retryable = retryable
        self.head: ResponseHead | None = None
        self.content = b""
        """Content of the response, once it is complete."""
        self._body_parts: list[bytes] = []
        self._body_bytes = 0

    def on_head(self, head: ResponseHead) -> None:
        self.head = head

    def on_body(self, data: bytes, boundary: int) -> None:  # noqa: ARG002  # ResponseHandler's signature
        self._body_bytes += len(data)
        if self._body_bytes > MAX_RESPONSE_BYTES:
            raise ResponseTooLarge(f"response longer than {MAX_RESPONSE_BYTES} bytes")
        self._body_parts.append(data)

    def on_end(self) -> None:
        body = self._body_parts[0] if len(self._body_parts) == 1 else b"".join(self._body_parts)
        assert self.head is not None
        try:
            self.content = dechunk(body) if self.head.length == CHUNKED else body
        except FramingError as error:
            self.on_failure(Failure.MALFORMED, str(error))
            return
        self.set_result(self.content)

    def on_complete_response(self, head: ResponseHead, content: bytes) -> None:
        self.head, self.content = head, content
        self.set_result(content)

    def on_failure(self, failure: Failure, detail: str) -> None:
        self.set_exception(LegFailed(failure, detail))

    def extend_deadline(self, now_s: float) -> float:
        return now_s


class RequestHandler(ResponseHandler, Awaitable[object], Protocol):
    """A `ResponseHandler` that can be awaited: it completes with the end of the response."""


H = TypeVar("H", bound=RequestHandler)


async def send_and_wait(
    pool: ConnectionPool,
    make_handler: Callable[[EngineConnection], H],
    build_request: Callable[[ConnectionPool], tuple[bytes, bytes]],
    *,
    connect_timeout_s: float,
    head_timeout_s: float,
    idle_timeout_s: float,
) -> H:
    """Send a request and wait until its handler completes; time-outs are those of `EngineConnection.send`.

    `build_request` returns head and body of the request. They are not kept: a body would else stay in memory
    as long as its response takes. Must be called in an inline task.
    If a reused connection was closed before the engine read the request, the request is sent once more on a
    fresh connection, with a new handler. Cancelling the call aborts the request.

    Raises:
        LegFailed: without a connection, or whatever the handler raises.
    """
    connection = pool.take_idle()
    if connection is None:
        connection = await pool.open(connect_timeout_s)
    while True:
        handler = make_handler(connection)
        connection.send(
            handler,
            *build_request(pool),
            head_timeout_s=head_timeout_s,
            idle_timeout_s=idle_timeout_s,
        )
        try:
            await handler
        except LegFailed:
            if not connection.lost_reuse_race:
                raise
        except asyncio.CancelledError:
            if connection.handler is handler:  # else the response is complete, and another leg may use it
                connection.abort()
            raise
        else:
            return handler
        # The engine closed its idle connection: not a failure. A fresh one cannot lose this race, so the loop
        # runs at most twice.
        connection = await _reopen(pool, connect_timeout_s)


async def _reopen(pool: ConnectionPool, connect_timeout_s: float) -> EngineConnection:
    """Open a connection after one that was closed behind a request: the request may have ended the engine."""
    try:
        return await pool.open(connect_timeout_s)
    except LegFailed as failed:
        failed.may_have_started = True
        raise


async def send_request(
    pool: ConnectionPool,
    head: bytes,
    body: bytes,
    *,
    connect_timeout_s: float,
    response_timeout_s: float,
    retryable: bool = True,
) -> tuple[int, bytes, ResponseHead]:
    """Send a request, wait for the whole response, and return its status, content and head.

    As `send_and_wait`. A response with status 5xx does not raise.
    """
    response = await send_and_wait(
        pool,
        lambda _: BufferedResponse(retryable=retryable),
        lambda _: (head, body),
        connect_timeout_s=connect_timeout_s,
        head_timeout_s=response_timeout_s,
        idle_timeout_s=0.0,
    )
    assert response.head is not None
    return response.head.status, response.content, response.head
