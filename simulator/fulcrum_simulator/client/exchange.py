"""One request on the wire: reads its answer as it comes and judges it once, at its end.

The answer's text is compared whole, after the last token has come, with the text that this prompt
must get; while tokens arrive nothing is done but to note them, since the generator shares its
processors with what it measures.
"""

from collections.abc import Callable
from typing import Any

import orjson

from fulcrum_simulator.client.outcomes import Ending, Outcome
from fulcrum_simulator.client.prompts import WrittenRequest
from fulcrum_simulator.text import BYTES_PER_TOKEN, output_text

_EVENT_END = b"\n\n"
_DATA = b"data: "
_DONE = b"[DONE]"


class Exchange:
    """The state of one request from its sending to its one outcome.

    `intended_s` and all times passed in are of one monotonic clock. Exactly one of `complete` and `lost` ends
    it; what comes later is ignored.
    """

    def __init__(
        self, request: WrittenRequest, *, index: int, intended_s: float, ended: Callable[[Outcome], None]
    ) -> None:
        self.request = request
        self._index = index
        self._intended_s = intended_s
        self._ended: Callable[[Outcome], None] | None = ended
        self._sent_s = intended_s
        self._first_s: float | None = None
        self._last_s = intended_s
        self._status = 0
        self._texts: list[str] = []
        self._rest = b""
        self._usage: dict[str, Any] | None = None
        self._done = False
        self._error: str | None = None

    def sent(self, now_s: float) -> None:
        """The request left."""
        self._sent_s = now_s

    def head(self, status: int) -> None:
        """The answer's status line came."""
        self._status = status

    def body(self, data: bytes, now_s: float) -> None:
        """A piece of the answer's body came."""
        if self._status != 200:
            return
        buffered = self._rest + data if self._rest else data
        *events, self._rest = buffered.split(_EVENT_END)
        for event in events:
            self._event(event, now_s)

    def _event(self, event: bytes, now_s: float) -> None:
        payload = event.removeprefix(_DATA)
        if payload == _DONE:
            self._done = True
            return
        try:
            said = orjson.loads(payload)
        except orjson.JSONDecodeError:
            self._error = self._error or "an event that is not JSON"
            return
        self._read(said, now_s)

    def _read(self, said: dict[str, Any], now_s: float) -> None:
        if "error" in said:
            self._error = _error_text(said)
        self._usage = said.get("usage") or self._usage
        for choice in said.get("choices") or ():
            text = _choice_text(choice)
            if text:
                self._texts.append(text)
                self._last_s = now_s
                self._first_s = now_s if self._first_s is None else self._first_s

    def complete(self, now_s: float) -> None:
        """The answer's last byte came, as HTTP counts it."""
        if self._status != 200:
            self._end(Ending.FAILED, f"status {self._status}", now_s)
            return
        if self._error is not None or not self._done:
            self._cut(self._error or "ended without [DONE]", now_s, told=self._error is not None)
            return
        difference = self._difference()
        self._end(Ending.WRONG if difference else Ending.OK, difference, now_s)

    def lost(self, why: str, now_s: float) -> None:
        """The connection went away, or the run ended, before the answer's last byte."""
        self._cut(self._error or why, now_s, told=self._error is not None)

    def _cut(self, why: str, now_s: float, *, told: bool) -> None:
        if not self._texts:
            self._end(Ending.FAILED, why, now_s)
        elif not self._expected().startswith("".join(self._texts)):
            self._end(Ending.WRONG, "text differs, then cut", now_s)
        else:
            self._end(Ending.BROKEN, why, now_s, told=told)

    def _expected(self) -> str:
        return output_text(self.request.digest, self.request.output_tokens)

    def _difference(self) -> str:
        """In words, how the finished answer differs from what it must be; empty if it does not."""
        text, expected = "".join(self._texts), self._expected()
        if len(text) != len(expected):
            return "token count differs"
        if text != expected:
            return "text differs"
        usage = self._usage
        if usage is None:
            return ""
        counted = usage.get("prompt_tokens"), usage.get("completion_tokens")
        return "" if counted == (self.request.input_tokens, self.request.output_tokens) else "usage differs"

    def _end(self, ending: Ending, reason: str, now_s: float, *, told: bool = False) -> None:
        ended, self._ended = self._ended, None
        if ended is None:
            return
        tokens = sum(map(len, self._texts)) // BYTES_PER_TOKEN
        first_s = self._first_s
        ended(
            Outcome(
                index=self._index,
                ending=ending,
                sent_late_s=self._sent_s - self._intended_s,
                end_s=now_s,
                output_tokens=tokens,
                ttft_s=None if first_s is None else first_s - self._intended_s,
                tpot_s=None if first_s is None or tokens < 2 else (self._last_s - first_s) / (tokens - 1),
                told=told,
                reason=reason,
            )
        )


def _choice_text(choice: dict[str, Any]) -> str:
    text = choice.get("text")
    if text is None:
        text = (choice.get("delta") or {}).get("content")
    return text or ""


def _error_text(said: dict[str, Any]) -> str:
    error = said["error"]
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
