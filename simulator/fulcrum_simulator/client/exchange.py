"""One request and its response: collects the streamed events and judges the outcome once, at the end.

The text is compared with the expected text only after the last token. The text of a real model is not known:
its tokens are only counted, by the engine. The generator shares its processors with the engines under test,
so it does as little as possible while tokens arrive. `generator` makes one for each request and `connection`
passes on the bytes.
"""

from collections.abc import Callable
from typing import Any

import orjson

from fulcrum_simulator.client.outcomes import LoadOutcome, OutcomeKind
from fulcrum_simulator.client.prompts import PreparedRequest
from fulcrum_simulator.text import BYTES_PER_TOKEN, output_text

_EVENT_END = b"\n\n"
_DATA = b"data: "
_DONE = b"[DONE]"
_REFUSED_STATUS = 429


class HttpExchange:
    """One request, from sending to its one outcome.

    All times are of one monotonic clock. The first call of `on_complete` or `on_lost` ends the exchange;
    later calls are ignored.
    """

    def __init__(
        self,
        request: PreparedRequest,
        *,
        index: int,
        intended_s: float,
        on_end: Callable[[LoadOutcome], None],
        degraded_tokens: int = 0,
    ) -> None:
        self.request = request
        self._index = index
        self._intended_s = intended_s
        self._on_end: Callable[[LoadOutcome], None] | None = on_end
        self._sent_s = intended_s
        self._first_token_s: float | None = None
        self._last_token_s = intended_s
        self._degraded_tokens = degraded_tokens
        self._status = 0
        self._retry_after_s = 0
        self._texts: list[str] = []
        self._buffer = b""
        self._usage: dict[str, Any] | None = None
        self._done = False
        self._error: str | None = None

    def on_sent(self, now_s: float) -> None:
        """Record that the request was written."""
        self._sent_s = now_s

    def on_status(self, status: int) -> None:
        """Record the status code of the response."""
        self._status = status

    def on_retry_after(self, value: bytes) -> None:
        """Record the header `Retry-After`; one that is not a number of seconds is ignored."""
        self._retry_after_s = int(value) if value.isdigit() else 0

    def on_body(self, data: bytes, now_s: float) -> None:
        """Read a piece of the response body, cut at any byte."""
        if self._status != 200:
            return
        buffered = self._buffer + data if self._buffer else data
        *events, self._buffer = buffered.split(_EVENT_END)
        for event in events:
            self._read_event(event, now_s)

    def _read_event(self, event: bytes, now_s: float) -> None:
        payload = event.removeprefix(_DATA)
        if payload == _DONE:
            self._done = True
            return
        try:
            message = orjson.loads(payload)
        except orjson.JSONDecodeError:
            self._error = self._error or "an event that is not JSON"
            return
        self._read_message(message, now_s)

    def _read_message(self, message: dict[str, Any], now_s: float) -> None:
        if "error" in message:
            self._error = _error_text(message)
        self._usage = message.get("usage") or self._usage
        for choice in message.get("choices") or ():
            text = _choice_text(choice)
            if text or self.request.digest is None:  # a token of a real model may be a part of a character
                self._texts.append(text)
                self._last_token_s = now_s
                self._first_token_s = now_s if self._first_token_s is None else self._first_token_s

    def on_complete(self, now_s: float) -> None:
        """End the exchange: HTTP signalled the end of the response."""
        if self._status == _REFUSED_STATUS:
            self._end(OutcomeKind.REFUSED, "", now_s)
            return
        if self._status != 200:
            self._end(OutcomeKind.FAILED, f"status {self._status}", now_s)
            return
        if self._error is not None or not self._done:
            self._end_incomplete(
                self._error or "ended without [DONE]", now_s, error_reported=self._error is not None
            )
            return
        difference = self._find_difference()
        self._end(OutcomeKind.WRONG if difference else OutcomeKind.OK, difference, now_s)

    def on_lost(self, reason: str, now_s: float) -> None:
        """End the exchange before the end of the response: the connection was lost or the run ended."""
        self._end_incomplete(self._error or reason, now_s, error_reported=self._error is not None)

    def _end_incomplete(self, reason: str, now_s: float, *, error_reported: bool) -> None:
        if not self._texts:
            self._end(OutcomeKind.FAILED, reason, now_s)
        elif not self._has_expected_start():
            self._end(OutcomeKind.WRONG, "text differs, then cut", now_s)
        else:
            self._end(OutcomeKind.BROKEN, reason, now_s, error_reported=error_reported)

    def _has_expected_start(self) -> bool:
        digest = self.request.digest
        if digest is None:
            return True
        return output_text(digest, self.request.output_tokens).startswith("".join(self._texts))

    def _find_difference(self) -> str:
        """Describe how the finished response differs from the expected one; empty if it does not."""
        digest, usage = self.request.digest, self._usage
        tokens = self._find_expected_tokens()
        if digest is not None:
            text, expected = "".join(self._texts), output_text(digest, tokens)
            if len(text) != len(expected):
                return "token count differs"
            if text != expected:
                return "text differs"
        if usage is None:
            return "" if digest is not None else "no usage"
        counted = usage.get("prompt_tokens"), usage.get("completion_tokens")
        return "" if counted == (self.request.input_tokens, tokens) else "usage differs"

    def _find_expected_tokens(self) -> int:
        """Output tokens of a right response: a limit by admission counts if its usage tells of it."""
        asked, limit = self.request.output_tokens, self._degraded_tokens
        told = (self._usage or {}).get("degraded_max_tokens")
        return min(asked, limit) if limit and told == limit else asked

    def _end(self, kind: OutcomeKind, reason: str, now_s: float, *, error_reported: bool = False) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is None:
            return
        tokens = self._count_tokens()
        first_token_s = self._first_token_s
        on_end(
            LoadOutcome(
                index=self._index,
                kind=kind,
                sent_late_s=self._sent_s - self._intended_s,
                end_s=now_s,
                output_tokens=tokens,
                input_tokens=self.request.input_tokens,
                tier=self.request.tier,
                ttft_s=None if first_token_s is None else first_token_s - self._intended_s,
                tpot_s=None
                if first_token_s is None or tokens < 2
                else (self._last_token_s - first_token_s) / (tokens - 1),
                error_reported=error_reported,
                reason=reason,
                retry_after_s=self._retry_after_s,
            )
        )

    def _count_tokens(self) -> int:
        """Output tokens; of a real model as the engine counted them, and 0 if its response has no end."""
        if self.request.digest is None:
            return int((self._usage or {}).get("completion_tokens", 0))
        return sum(map(len, self._texts)) // BYTES_PER_TOKEN


def _choice_text(choice: dict[str, Any]) -> str:
    text = choice.get("text")
    if text is None:
        text = (choice.get("delta") or {}).get("content")
    return text or ""


def _error_text(message: dict[str, Any]) -> str:
    error = message["error"]
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
