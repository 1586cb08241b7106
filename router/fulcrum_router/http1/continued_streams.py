"""Streams that break and go on with another engine: the output so far, the request for the rest, one stream.

A request is *sound* if another engine, given the prompt and the output so far, generates the rest: plain text
of one choice, greedy or with a seed. The output becomes part of the prompt; as token ids where the client has
sent ids and has the engine return them, else as text. The text is read from the bytes of the events, as vLLM
writes them. A stream of other events is not continued.

`data_path.continuation` uses it for one request; whether another engine is tried is the journey's decision.
"""

import re
from collections.abc import Mapping
from typing import Any

import orjson

from fulcrum_router.http1.framing import find_chunks, frame_chunk
from fulcrum_router.http1.output_limits import find_output_limit

_HARMLESS_FIELDS = frozenset(
    {
        *("add_special_tokens", "cache_salt", "ignore_eos", "logit_bias", "max_completion_tokens"),
        *("max_tokens", "messages", "metadata", "min_p", "min_tokens", "model", "parallel_tool_calls"),
        *("priority", "prompt", "repetition_penalty", "return_token_ids", "seed", "service_tier"),
        *("stop_token_ids", "store", "stream", "stream_options", "temperature", "top_k", "top_p", "user"),
    }
)
"""Fields with any value: the next token depends on all text before it, wherever prompt and output meet."""
_HARMLESS_VALUES: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "echo": (False,),
    "frequency_penalty": (0,),  # counts the tokens of the output alone
    "logprobs": (False,),
    "n": (1,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "stop": ([], ""),  # the engine withholds text that may begin one
    "tool_choice": ("none",),
    "tools": ([],),
    "top_logprobs": (0,),
}
_MAX_PARTS = 16
"""Pieces of a stream after which their text is taken out: events have ten times the bytes of their text."""
_MAX_PART_BYTES = 4_096

_JSON_TEXT = rb'"((?:[^"\\]|\\.)*)"'
_COMPLETION_TEXT = re.compile(rb'"choices":\[\{"index":0,"text":' + _JSON_TEXT)
_CHAT_TEXT = re.compile(
    rb'"choices":\[\{"index":0,"delta":\{(?:"role":"assistant",)?"content":'
    + _JSON_TEXT
    + rb'(?:,"[a-z_]+":null)*\}'
)
_TOKEN_IDS = re.compile(rb'"token_ids":\[((?:\d{1,9}(?:,\d{1,9})*)?)\]')
_FINISHED = b'"finish_reason":"'
_EVENT, _EVENT_END = b"\ndata: {", b"\n\n\r\n"
_ID, _CREATED = re.compile(rb'"id":"([^"\\]*)"'), re.compile(rb'"created":(\d{1,15})[,}]')
_MAX_TOKENS = 1_000_000_000
"""Larger counts of an engine are not added to."""


def can_continue(fields: Mapping[str, Any], *, chat: bool) -> bool:
    """Whether another engine can generate the rest of a broken response to a request with these fields.

    It can if the response is a stream, greedy or with a seed, from one prompt of text (or token ids, if the
    stream returns them), and no other field changes the text.
    """
    temperature = fields.get("temperature")
    is_greedy = type(temperature) in (int, float) and temperature == 0
    if fields.get("stream") is not True or not (is_greedy or type(fields.get("seed")) is int):
        return False
    for name in fields.keys() - _HARMLESS_FIELDS:
        if fields[name] is not None and fields[name] not in _HARMLESS_VALUES.get(name, ()):
            return False
    if not chat and fields.get("logprobs") is not None:  # a number: with 0, too, each token gets its own
        return False
    if chat:
        return _has_plain_messages(fields.get("messages"))
    prompt = fields.get("prompt")
    if type(prompt) is list and prompt and type(prompt[0]) is int:
        return fields.get("return_token_ids") is True
    return type(prompt) is str or (type(prompt) is list and len(prompt) == 1 and type(prompt[0]) is str)


def _has_plain_messages(messages: object) -> bool:
    if type(messages) is not list or not messages:
        return False
    plain = all(type(m) is dict and type(m.get("content")) is str for m in messages)
    return plain and messages[-1].get("role") != "assistant"


class DeliveredOutput:
    """The output of one stream that its client has."""

    __slots__ = (
        "_chat",
        "_counts_ids",
        "_ids",
        "_parts",
        "_texts",
        "created",
        "ends_event",
        "id",
        "is_finished",
        "is_readable",
        "kept_bytes",
        "tokens",
    )

    def __init__(self, *, chat: bool, as_ids: bool) -> None:
        self._chat, self._counts_ids = chat, as_ids
        self._parts: list[bytes] = []
        self._texts: list[bytes] = []
        """Contents of JSON strings."""
        self._ids: list[bytes] = []
        """Token ids with commas between them."""
        self.id, self.created = "", 0
        """Id and creation time that all events of the stream have in common."""
        self.tokens = 0
        """Events with output, each one token; the number of ids if the engine returns these."""
        self.kept_bytes = 0
        """Bytes of the text that was taken out."""
        self.is_readable = True
        """Whether all events looked as expected."""
        self.is_finished = False
        """Whether an event had a finish reason: nothing is left to generate."""
        self.ends_event = True
        """Whether the last byte ended an event, so that another one can follow."""

    def add(self, chunks: bytes) -> bool:
        """Add whole chunks that were sent to the client; return whether `kept_bytes` has grown."""
        parts = self._parts
        parts.append(chunks)
        if len(parts) < _MAX_PARTS and len(chunks) <= _MAX_PART_BYTES:
            return False
        self.read()
        return True

    def read(self) -> None:
        """Take the text out of the chunks that were added."""
        data, self._parts = b"".join(self._parts), []
        if not data or not self.is_readable:
            return
        texts: list[bytes] = (_CHAT_TEXT if self._chat else _COMPLETION_TEXT).findall(data)
        events = data.count(_EVENT)
        if not self.created:
            self._read_identity(data)
        self.ends_event = data.endswith(_EVENT_END)
        self.is_readable = len(texts) == events and bool(self.created)
        self.is_finished = self.is_finished or _FINISHED in data
        if self._counts_ids:
            self._read_ids(data, events)
        else:
            self.tokens += events - (self._chat and texts[:1] == [b""] and b'"role":' in data)
        self._texts.append(b"".join(texts))
        self.kept_bytes += len(self._texts[-1])

    def _read_identity(self, data: bytes) -> None:
        found_id, found_created = _ID.search(data), _CREATED.search(data)
        if found_id is not None and found_created is not None:
            self.id, self.created = found_id[1].decode(errors="replace"), int(found_created[1])

    def _read_ids(self, data: bytes, events: int) -> None:
        found: list[bytes] = _TOKEN_IDS.findall(data)
        self.is_readable = self.is_readable and len(found) == events
        ids = b",".join(filter(None, found))
        if ids:
            self._ids.append(ids)
            self.tokens += ids.count(b",") + 1
            self.kept_bytes += len(ids)

    @property
    def text(self) -> str:
        """The text so far."""
        return str(orjson.loads(b'"%b"' % b"".join(self._texts)))

    @property
    def token_ids(self) -> list[int]:
        """The token ids so far, if the engine returns them."""
        return list(map(int, b",".join(self._ids).split(b","))) if self._ids else []


def build_continued_body(raw: bytes, output: DeliveredOutput, *, chat: bool) -> bytes | None:
    """Build the body of a request for the rest of the output; None: there is none, or it cannot be had.

    A chat whose text ends with white space is not continued: some chat templates cut that off, and the engine
    would generate it again.
    """
    output.read()
    if not (output.is_readable and output.created and output.ends_event) or output.is_finished:
        return None
    fields: dict[str, Any] = orjson.loads(raw)
    limit = find_output_limit(fields, chat=chat)
    if limit is not None:
        name = "max_completion_tokens" if chat and "max_completion_tokens" in fields else "max_tokens"
        fields[name] = limit - output.tokens
        if fields[name] < 1:
            return None
    if type(fields.get("min_tokens")) is int:
        fields["min_tokens"] = max(0, fields["min_tokens"] - output.tokens)
    try:
        text = output.text
    except orjson.JSONDecodeError:
        return None
    if not chat:
        fields["prompt"] = _extend_prompt(fields["prompt"], output)
    elif text[-1:].isspace():
        return None
    elif text:
        fields["messages"] = [*fields["messages"], {"role": "assistant", "content": text}]
        fields.update(continue_final_message=True, add_generation_prompt=False)
    return orjson.dumps(fields)


def _extend_prompt(prompt: Any, output: DeliveredOutput) -> Any:
    if type(prompt) is str:
        return prompt + output.text
    return [prompt[0] + output.text] if type(prompt[0]) is str else [*prompt, *output.token_ids]


class ContinuedStream:
    """Makes the events of a later engine those of the stream that the client reads.

    Args:
        output: What the client has from the engines before.
    """

    __slots__ = ("_created", "_id", "tokens_before")

    def __init__(self, output: DeliveredOutput) -> None:
        self._id, self._created, self.tokens_before = output.id, output.created, output.tokens

    def rewrite(self, framed: bytes) -> bytes:
        """Return whole chunks with the id of the stream, its usage, and no second opening."""
        kept: list[bytes] = []
        position = 0
        for start, end, after in find_chunks(framed):
            events = framed[start:end].removesuffix(b"\n\n").split(b"\n\n")
            content = b"".join(event + b"\n\n" for event in map(self._rewrite_event, events) if event)
            kept.append(frame_chunk(content) if content else b"")
            position = after
        return b"".join((*kept, framed[position:]))

    def _rewrite_event(self, event: bytes) -> bytes:
        if not event.startswith(b"data: {"):
            return event
        try:
            fields = orjson.loads(event[6:])
        except orjson.JSONDecodeError:
            return event
        fields["id"], fields["created"] = self._id, self._created
        choices = fields.get("choices")
        if type(choices) is list:
            for choice in choices:
                if type(choice) is dict and not _drop_opening(choice):
                    return b""
        _drop_prompt_ids(fields)
        usage = fields.get("usage")
        if type(usage) is dict:
            _move_tokens(usage, self.tokens_before)
        try:
            return b"data: " + orjson.dumps(fields)
        except orjson.JSONEncodeError:  # nested too deeply
            return event


def _move_tokens(usage: dict[str, Any], count: int) -> None:
    """Count `count` tokens of the prompt as output, if the usage has both counts."""
    prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if type(prompt) is int and type(completion) is int and 0 <= completion <= _MAX_TOKENS:
        usage["completion_tokens"], usage["prompt_tokens"] = completion + count, max(0, prompt - count)


def _drop_opening(choice: dict[str, Any]) -> bool:
    """Drop the role, and prompt ids; return whether the choice has anything else."""
    _drop_prompt_ids(choice)
    delta = choice.get("delta")
    if type(delta) is not dict or "role" not in delta:
        return True
    del delta["role"]
    return any(delta.values()) or choice.get("finish_reason") is not None


def _drop_prompt_ids(fields: dict[str, Any]) -> None:
    if fields.get("prompt_token_ids") is not None:
        fields["prompt_token_ids"] = None
