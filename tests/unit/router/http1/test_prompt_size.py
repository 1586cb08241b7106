"""How many bytes of prompt a request has: by its text, messages, tools, documents and token ids."""

import json
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import orjson
import pytest

from fulcrum_router.http1.json_limits import parse_limited_object
from fulcrum_router.http1.prompt_size import has_only_text, measure_conversation, measure_prompt

TOOL = {"type": "function", "function": {"name": "f", "description": "x" * 400, "parameters": {"y" * 80: 1}}}
CALL = {"id": "c", "function": {"name": "f", "arguments": "z" * 500}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:" + "A" * 9_000}}


def size(*values: object) -> int:
    """The bytes of values as JSON, with commas between them."""
    return len(json.dumps(values, separators=(",", ":"), ensure_ascii=False).encode()) - 2


@pytest.mark.parametrize(
    ("request_fields", "measured"),
    [
        pytest.param({"prompt": "abcd"}, (4, 0), id="bytes of a text"),
        pytest.param({"prompt": "äöü"}, (6, 0), id="bytes of a text in UTF-8"),
        pytest.param({"prompt": [1, 2, 3]}, (0, 3), id="number of token ids"),
        pytest.param({"prompt": ["ab", "c"]}, (3, 0), id="sum over several prompts"),
        pytest.param({"prompt": [[1, 2], [3]]}, (0, 3), id="sum over several prompts of token ids"),
        pytest.param({"messages": [{"content": "ab"}, {"content": "c"}]}, (3, 0), id="sum over messages"),
        pytest.param(
            {"messages": [{"content": [{"type": "text", "text": "ab"}, IMAGE]}]},
            (2, 0),
            id="no media",
        ),
        pytest.param({"messages": [{"content": ["ab", "c"]}]}, (3, 0), id="parts that are texts"),
        pytest.param({"messages": [{"content": None}, "x"]}, (0, 0), id="0 for a message without content"),
        pytest.param({}, (0, 0), id="0 for a request without a prompt"),
        pytest.param(
            {"prompt": "x" * 100, "truncate_prompt_tokens": 7}, (0, 7), id="a truncated prompt as token ids"
        ),
        pytest.param(
            {"prompt": "abc", "truncate_prompt_tokens": 7},
            (3, 0),
            id="bytes of a prompt that is not truncated",
        ),
        pytest.param({"prompt": 5}, (0, 0), id="0 for an invalid prompt, which the engine refuses"),
        pytest.param(
            {"messages": [{"content": "ab"}], "tools": [TOOL]}, (2 + size([TOOL]), 0), id="tools as JSON"
        ),
        pytest.param(
            {"messages": [], "documents": [{"text": "é"}]}, (size([{"text": "é"}]), 0), id="documents"
        ),
        pytest.param(
            {"messages": [], "chat_template_kwargs": {"a": "b"}},
            (size({"a": "b"}), 0),
            id="template arguments",
        ),
        pytest.param(
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL]}]},
            (size([CALL]), 0),
            id="calls of tools",
        ),
        pytest.param(
            {"messages": [{"role": "assistant", "tool_calls": [CALL]}]},
            (size([CALL]), 0),
            id="calls of tools in a message without content",
        ),
        pytest.param(
            {"messages": [{"role": "assistant", "content": "a", "reasoning_content": "bc"}]},
            (1 + size("bc"), 0),
            id="reasoning",
        ),
        pytest.param(
            {"messages": [{"content": [{"type": "refusal", "refusal": "no"}]}]},
            (size({"type": "refusal", "refusal": "no"}), 0),
            id="parts of other types",
        ),
        pytest.param({"messages": [{"role": "rôle", "content": "ab"}]}, (5 + 2, 0), id="unknown roles"),
        pytest.param({"messages": [{"role": "rôle"}]}, (5, 0), id="an unknown role without content"),
        pytest.param({"messages": [{"role": ["r"], "content": "ab"}]}, (2, 0), id="no role that is no text"),
        pytest.param(
            {"messages": [{"role": "user", "content": "a", "name": "ab", "task": "c"}]},
            (1 + size("ab", "c"), 0),
            id="names and tasks",
        ),
        pytest.param(
            {"messages": [{"role": "tool", "tool_call_id": "abc", "content": "r"}]},
            (1 + size("abc"), 0),
            id="ids of calls of tools",
        ),
        pytest.param(
            {"messages": [{"role": "developer", "content": "a", "tools": [TOOL]}]},
            (1 + size([TOOL]), 0),
            id="tools of a developer",
        ),
        pytest.param({"messages": [{"content": "a", "other": "x" * 99}]}, (1, 0), id="no unknown fields"),
        pytest.param({"prompt": "ab", "tools": [TOOL]}, (2, 0), id="a completion has no tools"),
    ],
)
def test_a_prompt_is_measured_in_text_bytes_and_token_ids(
    request_fields: dict[str, Any], measured: tuple[int, int]
) -> None:
    assert measure_prompt(request_fields) == measured


USE = {"type": "tool_use", "id": "u", "name": "f", "input": {"a": "b" * 300}, "text": ""}
RESULT = {"type": "tool_result", "tool_use_id": "u", "content": [{"type": "text", "text": "r" * 700}, IMAGE]}


@pytest.mark.parametrize(
    ("request_fields", "measured"),
    [
        pytest.param({"input": "abcd", "instructions": "ef"}, 6, id="texts"),
        pytest.param({"input": "ab", "tools": [TOOL]}, 2 + size([TOOL]), id="tools"),
        pytest.param(
            {
                "input": [
                    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "ab"}]}
                ]
            },
            2,
            id="messages of an input",
        ),
        pytest.param(
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "z" * 500}]},
            size("c", "f", "z" * 500),
            id="calls of functions",
        ),
        pytest.param(
            {"input": [{"type": "function_call_output", "call_id": "c", "output": "o" * 600}]},
            600 + size("c"),
            id="outputs of functions",
        ),
        pytest.param(
            {"input": [{"content": [{"type": "input_image", "image_url": "data:" + "A" * 9_000}]}]},
            0,
            id="no media",
        ),
        pytest.param(
            {"system": [{"type": "text", "text": "ab"}], "messages": [{"role": "user", "content": "c"}]},
            3,
            id="a system prompt of parts",
        ),
        pytest.param({"messages": [{"role": "assistant", "content": [USE]}]}, size(USE), id="uses of tools"),
        pytest.param({"messages": [{"role": "user", "content": [RESULT]}]}, 700, id="results of tools"),
        pytest.param({"input": 5, "messages": {}}, 0, id="0 for what the engine refuses"),
    ],
)
def test_a_conversation_is_measured_in_bytes(request_fields: dict[str, Any], measured: int) -> None:
    assert measure_conversation(request_fields) == measured


def test_parts_nest_as_deep_as_a_body_may() -> None:
    part: dict[str, Any] = {"type": "tool_result", "content": "x"}
    for _ in range(120):
        part = {"type": "tool_result", "content": [part]}
    assert measure_conversation({"messages": [{"content": [part]}]}) == 1


def make_chat(*content: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}]}


STEPS_MAX = 75_000
"""Instructions for a hundredth of the longest body, of which today up to 57,000 are needed."""


def count_steps(function: Callable[[dict[str, Any]], object], request_fields: dict[str, Any]) -> int:
    """Count the interpreter's instructions of a call: unlike its time, they are the same on each machine."""
    steps = 0

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal steps
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        steps += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function(request_fields)
    finally:
        sys.settrace(before)
    return steps


@pytest.mark.parametrize(
    ("count", "make_request"),
    [
        pytest.param(170_000, lambda count: make_chat(*["é"] * count), id="texts"),
        pytest.param(340_000, lambda count: make_chat(*[""] * count), id="empty texts"),
        pytest.param(300_000, lambda count: make_chat(*[1] * count), id="numbers"),
        pytest.param(32_000, lambda count: make_chat(*[{"type": "text", "text": "é"}] * count), id="parts"),
        pytest.param(
            24_000,
            lambda count: {"messages": [{"role": "r", "name": "n", "content": "é"}] * count},
            id="messages",
        ),
        pytest.param(300_000, lambda count: {"messages": [1] * count}, id="no messages"),
        pytest.param(300_000, lambda count: {"input": [1] * count}, id="no turns"),
    ],
)
@pytest.mark.parametrize("measure", [measure_prompt, measure_conversation])
def test_the_longest_body_that_is_parsed_is_measured_in_few_steps(
    measure: Callable[[dict[str, Any]], object], count: int, make_request: Callable[[int], dict[str, Any]]
) -> None:
    parse_limited_object(orjson.dumps(make_request(count)))
    assert count_steps(measure, make_request(count // 100)) <= STEPS_MAX


@pytest.mark.parametrize(
    ("request_fields", "expected"),
    [
        ({"prompt": "a"}, True),
        ({"messages": [{"role": "user", "content": "a" * 32}]}, True),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a" * 32}]}]}, True),
        (
            {"messages": [{"role": "user", "content": "a" * 256}] + [{"role": "user", "content": ""}] * 100},
            False,
        ),
        ({"messages": [{"role": "user", "content": []}] * 100}, False),
        ({"messages": [{"role": "user", "content": "a" * 99}], "tools": [{}]}, False),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            False,
        ),
        ({"messages": [{"role": "user", "content": "a" * 99, "tool_calls": [{}]}]}, False),
        ({"messages": [{"role": "user", "content": "a" * 99, "reasoning_content": "a"}]}, False),
        ({"messages": [{"role": "user", "content": "a" * 99, "name": "n"}]}, False),
        ({"messages": [{"role": "tool", "content": "a" * 99, "tool_call_id": "c"}]}, False),
        ({"messages": [{"role": "r" * 9, "content": "a" * 99}]}, False),
        ({"messages": [{"role": ["user"], "content": "a" * 99}]}, False),
        ({"messages": [None]}, False),
    ],
    ids=[
        "prompt",
        "chat",
        "text parts",
        "empty messages",
        "no parts",
        "tools",
        "image",
        "tool calls",
        "reasoning",
        "name",
        "id of a call of a tool",
        "unknown role",
        "role that is no text",
        "no message",
    ],
)
def test_only_text_teaches_the_tokens_per_byte(request_fields: dict[str, Any], expected: bool) -> None:
    prompt_bytes, _ = measure_prompt(request_fields)
    assert has_only_text(request_fields, prompt_bytes=prompt_bytes) is expected
