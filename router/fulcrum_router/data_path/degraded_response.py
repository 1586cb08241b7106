"""The response of a decode leg whose output admission limited: its usage says so.

`decode` uses it instead of `DecodeResponse` for such a request. The limit is `policy.tiers.admission`'s, the
bytes are `http1.degraded_usage`'s.
"""

from fulcrum_router.data_path.decode_response import DecodeResponse
from fulcrum_router.http1.degraded_usage import add_limit_to_stream, add_output_limit, set_length
from fulcrum_router.http1.framing import CHUNKED, ResponseHead


class DegradedResponse(DecodeResponse):
    """A response that may have at most `output_limit` tokens; set before the first byte."""

    __slots__ = ("output_limit",)

    output_limit: int

    def on_complete_response(self, head: ResponseHead, content: bytes) -> None:
        self.on_head(head)
        self.on_body(content, len(content))
        self.on_end()

    def _take_usage(self, data: bytes) -> bytes:
        data = super()._take_usage(data)
        if self.head is None or self.head.length != CHUNKED or self._chunks.starts_mid_chunk:
            return data
        return add_limit_to_stream(data, self.output_limit)

    def _send_collected(self) -> None:
        head = self.head
        if head is not None and head.status == 200 and head.length == self._body_bytes:
            content = add_output_limit(b"".join(self._body_parts), self.output_limit)
            self._body_parts, self.head = [content], set_length(head, len(content))
        super()._send_collected()
