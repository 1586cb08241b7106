"""Measure the prompt of a parsed request in bytes, from which its tokens are predicted.

There is no tokeniser. Measured is what chat templates write into the prompt: texts, and tools, their calls
and documents as JSON. Media are not measured: only an engine knows their tokens. Engines count the prompt
later, so that an error here lasts no longer than the request. `bodies` measures every completion by it;
tokens are predicted from bytes in `policy.predictions.estimate`.
"""

from collections.abc import Mapping
from typing import Any

import orjson

MIN_MESSAGE_BYTES = 32
"""Mean text of a chat's messages below which most tokens are those of the chat template."""

_TEMPLATE_FIELDS = frozenset({"tools", "documents", "chat_template_kwargs"})
"""Fields of a chat that its template writes into the prompt."""
_UNTAUGHT_FIELDS = _TEMPLATE_FIELDS | {
    *("functions", "chat_template", "mm_processor_kwargs", "media_io_kwargs", "prompt_embeds", "suffix")
}
"""Fields that add tokens to a prompt besides its text."""
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
"""Usual roles of messages. vLLM takes any text, and a template may write it into the prompt."""
_MESSAGE_FIELDS = frozenset(
    {
        *("tool_calls", "function_call", "reasoning", "reasoning_content"),
        *("name", "task", "tool_call_id", "tools"),
    }
)
"""Fields of a chat's message that a template may write into the prompt besides its role and content."""
_USUAL_FIELDS = 2
"""Role and content: a message with no more fields is not searched for others, which is the usual case."""
_ITEM_HEADS = frozenset({"content", "output", "role", "type", "id", "status"})
"""Fields of a turn that are no text, or are measured on their own."""
_TEXT_PARTS = frozenset({None, "text", "input_text", "output_text"})
_MEDIA_PARTS = frozenset(
    {
        *("image", "image_url", "image_pil", "image_embeds", "input_image", "input_audio", "audio_url"),
        *("audio_embeds", "video_url", "input_file", "file", "prompt_embeds"),
    }
)
"""Types of content parts that hold media, and fields that make a part one of them."""


def measure_prompt(request: Mapping[str, Any]) -> tuple[int, int]:
    """Measure the prompt of a completion or chat: bytes, and number of its token ids.

    A prompt that the engine truncates counts as so many token ids.
    """
    prompt = request.get("prompt")
    if prompt is None:
        size, ids = _measure_chat(request), 0
    else:
        size, ids = _measure_prompt_field(prompt)
    limit = request.get("truncate_prompt_tokens")
    if type(limit) is int and 0 <= limit < size + ids:
        return 0, limit
    return size, ids


def measure_conversation(request: Mapping[str, Any]) -> int:
    """Measure the prompt of a request to `/v1/responses` or `/v1/messages`, in bytes."""
    values: list[object] = [request["tools"]] if request.get("tools") else []
    size = sum(_measure_content(request.get(name), values) for name in ("instructions", "system"))
    given = request.get("input")
    if isinstance(given, list):
        size += _measure_turns(given, values)
    else:
        size += _measure_content(given, values) + _measure_turns(request.get("messages"), values)
    return size + _measure_json(values) if values else size


def has_only_text(request: Mapping[str, Any], *, prompt_bytes: int) -> bool:
    """Whether the measured texts are nearly all that the engine's count of the prompt's tokens comes from.

    Only such prompts teach the tokens per byte; others would let one client bend the estimates of all.
    """
    if not _UNTAUGHT_FIELDS.isdisjoint(request):
        return False
    messages = request.get("messages")
    if type(messages) is not list:
        return True
    return prompt_bytes >= MIN_MESSAGE_BYTES * len(messages) and all(map(_is_text_message, messages))


def _is_text_message(message: object) -> bool:
    if type(message) is not dict or not _MESSAGE_FIELDS.isdisjoint(message):
        return False
    role, content = message.get("role"), message.get("content")
    if type(role) is not str or role not in _ROLES:
        return False
    if type(content) is str:
        return True
    return type(content) is list and all(
        type(part) is dict and part.get("type") == "text" for part in content
    )


def _measure_prompt_field(prompt: object) -> tuple[int, int]:
    if isinstance(prompt, str):
        return _count_utf8_bytes(prompt), 0
    if not isinstance(prompt, list):
        return 0, 0
    if all(isinstance(item, int) for item in prompt[:1]):
        return 0, len(prompt)
    size = sum(_count_utf8_bytes(item) for item in prompt if isinstance(item, str))
    return size, sum(len(item) for item in prompt if isinstance(item, list))


# Values that are measured as JSON are collected in a list: to serialise each on its own takes several times
# as long. So are texts of parts: a body may have hundreds of thousands.


def _measure_chat(request: Mapping[str, Any]) -> int:
    values: list[object] = []
    size = 0
    messages = request.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict):
            content, role = message.get("content"), message.get("role")
            is_usual = type(role) is str and role in _ROLES
            if not is_usual and type(role) is str:
                size += _count_utf8_bytes(role)
            if type(content) is str:
                size += _count_utf8_bytes(content)
                if is_usual and len(message) <= _USUAL_FIELDS:
                    continue
            elif content is not None:
                size += _measure_content(content, values)
            for name, value in message.items():
                if value and name in _MESSAGE_FIELDS:
                    values.append(value)
    if not _TEMPLATE_FIELDS.isdisjoint(request):
        values += [request[name] for name in _TEMPLATE_FIELDS if request.get(name)]
    return size + _measure_json(values) if values else size


def _measure_turns(turns: object, values: list[object]) -> int:
    """Measure messages, or items of an input: messages, calls of functions and their outputs."""
    size = 0
    for turn in turns if isinstance(turns, list) else ():
        if isinstance(turn, dict):
            for text in (turn.get("content"), turn.get("output")):
                if text is not None:
                    size += _measure_content(text, values)
            for name, value in turn.items():
                if name not in _ITEM_HEADS:
                    values.append(value)
    return size


def _measure_content(content: object, values: list[object]) -> int:
    if isinstance(content, str):
        return _count_utf8_bytes(content)
    if not isinstance(content, list):
        return 0
    size = 0
    texts: list[str] = []
    for part in content:
        if type(part) is dict:
            size += _measure_part(part, values)
        elif part and type(part) is str:
            texts.append(part)
    return size + _count_utf8_bytes("".join(texts)) if texts else size


def _measure_part(part: dict[str, Any], values: list[object]) -> int:
    kind, text = part.get("type"), part.get("text")
    if kind is not None and type(kind) is not str:
        return 0
    if isinstance(text, str) and kind in _TEXT_PARTS:
        return _count_utf8_bytes(text)
    if kind in _MEDIA_PARTS or (kind is None and not _MEDIA_PARTS.isdisjoint(part)):
        return 0
    if "content" in part:  # the result of a tool, which may have media
        return _measure_content(part["content"], values)
    values.append(part)
    return 0


def _measure_json(values: list[object]) -> int:
    """The bytes of the values as JSON, but for the brackets around all of them."""
    try:
        return len(orjson.dumps(values)) - len("[]")
    except orjson.JSONEncodeError:  # nested too deeply
        return 0


def _count_utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
