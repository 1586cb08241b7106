"""Receive a request's tokens: collected into one JSON response, or streamed as server-sent events.

The step loop calls the sinks directly. A streamed token is formatted and written to the transport in the
step's own callback: waking a task for each token would cost more than everything else per token. `app` makes
one for each request.
"""

import asyncio
from dataclasses import dataclass

from fulcrum_simulator.engine import EngineDead, Finished, OutputToken
from fulcrum_simulator.server.responses import ResponseTemplate
from fulcrum_simulator.text import output_token


@dataclass(frozen=True, slots=True)
class ResponseEnd:
    """The end of a request. `end` is None if the request never reached the engine."""

    reason: str
    tokens: int
    end: Finished | None


class _TokenSink:
    def __init__(self, *, first_index: int = 0) -> None:
        self.ending: asyncio.Future[ResponseEnd] = asyncio.get_running_loop().create_future()
        self._first_index = first_index
        """Index of the first token in the output for the prompt: more than 0 if it ends with output."""
        self._tokens = 0

    def _end(self, end: Finished | None) -> None:
        if not self.ending.done():
            self.ending.set_result(ResponseEnd(end.reason if end else "abort", self._tokens, end))

    def on_engine_death(self) -> None:
        """Raise EngineDead in the handler that awaits `ending`."""
        if not self.ending.done():
            self.ending.set_exception(EngineDead())


class BufferedTokens(_TokenSink):
    """Collects the text of a request that does not stream."""

    def __init__(self, *, first_index: int = 0) -> None:
        super().__init__(first_index=first_index)
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._texts)

    def on_token(self, out: OutputToken) -> None:
        """Append one token."""
        self._tokens += 1
        self._texts.append(output_token(out.digest, self._first_index + out.index))

    def on_finished(self, end: Finished | None) -> None:
        """Wake the handler."""
        self._end(end)


class StreamedResponse(_TokenSink):
    """Writes each token as one server-sent event in one HTTP chunk, directly to the transport.

    The last event carries the finish reason, so the last permitted token is kept until `on_finished`. Both
    are from the same step, so nothing is delayed.
    """

    def __init__(
        self,
        template: ResponseTemplate,
        transport: asyncio.WriteTransport,
        *,
        max_tokens: int,
        first_index: int = 0,
    ) -> None:
        super().__init__(first_index=first_index)
        self._template, self._transport, self._max_tokens = template, transport, max_tokens
        self._last_text = ""

    def on_token(self, out: OutputToken) -> None:
        """Send one token, or keep it if it is the last permitted one."""
        self._tokens += 1
        text = output_token(out.digest, self._first_index + out.index)
        if self._tokens == self._max_tokens:
            self._last_text = text
        else:
            opening = self._template.format_opening() if self._tokens == 1 else b""
            self._send(opening + self._template.format_token(text))

    def on_finished(self, end: Finished | None) -> None:
        """Send the last event, then wake the handler, which ends the response."""
        unopened = self._tokens == 0 or (self._tokens == 1 and bool(self._last_text))
        self._send(
            (self._template.format_opening() if unopened else b"")
            + self._template.format_last_token(self._last_text, end.reason if end else "abort")
        )
        self._end(end)

    def _send(self, event: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(event), event))
