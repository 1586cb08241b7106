"""What is kept of one stream, so that another engine can go on with it: the request, and the text so far.

`ServedRequest` creates a `Continuation` at the first byte of every stream, and asks it for the body of the
next request when the engine fails. Then the journey decides whether another engine is tried. Request and text
are kept for sound requests only (see `http1.continued_streams`), else just the outcome to count. A stream of
which more than `MAX_STREAM_BYTES` would be kept, or for which `KeptBytes` or `RequestMemory` has no room, is
not continued. The text is written nowhere but into the request to the next engine.
"""

from collections.abc import Mapping
from typing import Any

from fulcrum_router.counters import ContinuationOutcome
from fulcrum_router.http1.continued_streams import (
    ContinuedStream,
    DeliveredOutput,
    build_continued_body,
    can_continue,
)
from fulcrum_router.http1.limits import KeptBytes, RequestMemory, estimate_parsed_bytes

MAX_STREAM_BYTES = 65_536
"""Most bytes of one request and its text that are kept: to parse and to serialise more takes too long."""
_TEXT_COPIES = 3
"""The text that is kept, the prompt that it is added to, and the body of the leg."""
_UNREAD_BYTES = 4_096
"""Estimated bytes of events whose text was not taken out yet."""


class Continuation:
    """One stream that another engine can go on with, while `output` is not None. The owner calls `forget`."""

    __slots__ = (
        "_chat",
        "_held_bytes",
        "_kept",
        "_kept_bytes",
        "_memory",
        "_output",
        "_raw",
        "_tenant",
        "outcome",
        "stream",
    )

    def __init__(
        self,
        raw: bytes,
        fields: Mapping[str, Any],
        kept: KeptBytes,
        memory: RequestMemory,
        *,
        tenant: str,
        chat: bool,
        chunked: bool,
    ) -> None:
        self._kept, self._memory, self._tenant, self._chat = kept, memory, tenant, chat
        self._kept_bytes = self._held_bytes = 0
        self._raw = raw
        self._output: DeliveredOutput | None = None
        self.stream: ContinuedStream | None = None
        """Makes the events of the next engine those of the same stream; None: no engine has failed."""
        self.outcome = ContinuationOutcome.NOT_SOUND
        """What is counted if the stream breaks and is not continued."""
        if chunked and can_continue(fields, chat=chat):
            prompt = fields.get("prompt")
            self._output = DeliveredOutput(
                chat=chat, as_ids=not chat and type(prompt) is list and type(prompt[0]) is int
            )
            self.outcome = ContinuationOutcome.FAILED
            self._keep(len(raw) + _UNREAD_BYTES)
        if self._output is None:
            self._raw = b""

    @property
    def output(self) -> DeliveredOutput | None:
        """The output that the client has; None: the stream is not continued if it breaks."""
        return self._output

    def add(self, chunks: bytes) -> None:
        """Keep the text of whole chunks that were sent to the client."""
        output = self._output
        if output is not None:
            before = output.kept_bytes
            if output.add(chunks):
                self._keep(output.kept_bytes - before)

    def _keep(self, size: int) -> None:
        if self._kept_bytes + size <= MAX_STREAM_BYTES and self._kept.keep(size, tenant=self._tenant):
            self._kept_bytes += size
            return
        self.forget()
        self.outcome = ContinuationOutcome.NOT_KEPT

    def build_body(self) -> bytes | None:
        """Build the body of the request for the rest, and prepare `stream` for it; None: there is none."""
        output = self._output
        if output is None or not self._hold(output):
            return None
        try:
            body = build_continued_body(self._raw, output, chat=self._chat)
        except (ValueError, TypeError):  # values that JSON cannot have: the engine is odd, not the router
            body = None
        if body is None:
            self.outcome = ContinuationOutcome.NOT_SOUND
            return None
        self.stream = ContinuedStream(output)
        return body

    def _hold(self, output: DeliveredOutput) -> bool:
        """Count the memory of the request for the rest; False if the router has none for it."""
        memory = self._memory
        size = estimate_parsed_bytes(self._raw, few_held=memory.holds_few)
        size += _TEXT_COPIES * output.kept_bytes
        if not memory.hold(size, body_bytes=len(self._raw)):
            self.outcome = ContinuationOutcome.NOT_KEPT
            return False
        self._held_bytes += size
        return True

    def release_body(self) -> None:
        """Free the memory of the request for the rest: no leg needs it again."""
        self._memory.release(self._held_bytes)
        self._held_bytes = 0

    @property
    def counted_tokens(self) -> int:
        """Output tokens of the engines that have failed; their events are not counted again."""
        return 0 if self.stream is None else self.stream.tokens_before

    def forget(self) -> None:
        """Free what is kept."""
        self.release_body()
        self._kept.release(self._kept_bytes, tenant=self._tenant)
        self._kept_bytes, self._raw, self._output = 0, b"", None
