"""Text that is read from events, requests for the rest of it, and the events of a second engine."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulcrum_router.http1.continued_streams import (
    ContinuedStream,
    DeliveredOutput,
    build_continued_body,
    can_continue,
)
from fulcrum_router.http1.framing import frame_chunk

SOUND: dict[str, Any] = {"prompt": "p", "stream": True, "temperature": 0}


def write_event(text: str, *, chat: bool = False, created: int = 7, **fields: Any) -> bytes:
    """An event as vLLM writes it."""
    part: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
    choice = {"index": 0, **part, "logprobs": None, "finish_reason": None, **fields}
    event = {"id": "x", "object": "o", "created": created, "model": "m", "choices": [choice]}
    return b"data: " + json.dumps(event, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


def deliver(*texts: str, chat: bool = False, as_ids: bool = False, **fields: Any) -> DeliveredOutput:
    output = DeliveredOutput(chat=chat, as_ids=as_ids)
    for text in texts:
        output.add(frame_chunk(write_event(text, chat=chat, **fields)))
    return output


@given(
    texts=st.lists(st.text(), min_size=1, max_size=40),
    several=st.lists(st.integers(1, 5), min_size=1),
    chat=st.booleans(),
)
def test_any_text_in_any_chunks_is_read_as_it_was_written(
    texts: list[str], several: list[int], chat: bool
) -> None:
    output, events = DeliveredOutput(chat=chat, as_ids=False), [write_event(t, chat=chat) for t in texts]
    while events:
        count = several[len(events) % len(several)]
        output.add(frame_chunk(b"".join(events[:count])))
        del events[:count]
    output.read()
    assert (output.text, output.tokens, output.is_readable) == ("".join(texts), len(texts), True)


@given(data=st.lists(st.binary() | st.sampled_from([b"data: {", b"\n\n", b'"text":"', b"\r\n", b"e"])))
def test_any_bytes_are_read_and_rewritten_without_an_error(data: list[bytes]) -> None:
    output = deliver("a")
    for piece in data:
        output.add(frame_chunk(piece))
    build_continued_body(json.dumps(SOUND).encode(), output, chat=False)
    ContinuedStream(output).rewrite(b"".join(frame_chunk(piece) for piece in data if piece))


_ODD_NUMBERS = st.sampled_from(
    [
        "null",
        "-1",
        "1.5",
        '"1"',
        "[]",
        "{}",
        "[1,,2]",
        "[1]",
        "9" * 30,
        "9" * 5_000,
        str(2**63),
        str(2**64 - 1),
    ]
) | st.integers(0, 2**70).map(str)


@given(
    created=_ODD_NUMBERS, ids=_ODD_NUMBERS, prompt=_ODD_NUMBERS, completion=_ODD_NUMBERS, as_ids=st.booleans()
)
def test_any_numbers_are_read_and_rewritten_without_an_error(
    created: str, ids: str, prompt: str, completion: str, as_ids: bool
) -> None:
    usage = f'"usage":{{"prompt_tokens":{prompt},"completion_tokens":{completion}}}'
    choices = f'"choices":[{{"index":0,"text":"a","token_ids":{ids}}}]'
    odd = frame_chunk(f'data: {{"id":"x","created":{created},{choices},{usage}}}\n\n'.encode())
    prompt_ids = json.dumps({**SOUND, "prompt": [1], "max_tokens": 9} if as_ids else SOUND).encode()
    for first in (odd, frame_chunk(write_event("a", token_ids=[3]))):
        output = DeliveredOutput(chat=False, as_ids=as_ids)
        output.add(first)
        build_continued_body(prompt_ids, output, chat=False)
        ContinuedStream(output).rewrite(odd)


@given(texts=st.lists(st.text(), min_size=1), chat=st.booleans())
def test_the_events_of_the_next_engine_get_the_identity_of_the_first_and_keep_their_text(
    texts: list[str], chat: bool
) -> None:
    stream = ContinuedStream(_read(deliver("a", chat=chat, created=5)))
    after = DeliveredOutput(chat=chat, as_ids=False)
    after.add(stream.rewrite(b"".join(frame_chunk(write_event(t, chat=chat, created=99)) for t in texts)))
    after.read()
    assert (after.text, after.created, after.id) == ("".join(texts), 5, "x")


def _read(output: DeliveredOutput) -> DeliveredOutput:
    output.read()
    return output


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="greedy"),
        pytest.param(
            {"temperature": 0.0, "n": 1, "echo": False, "logprobs": None, "stop": None}, id="defaults"
        ),
        pytest.param({"temperature": 0.7, "seed": 3}, id="a seed"),
        pytest.param({"prompt": ["one"]}, id="one prompt in a list"),
        pytest.param({"prompt": [1], "return_token_ids": True}, id="token ids that are returned"),
    ],
)
def test_a_sound_request_can_be_continued(fields: dict[str, Any]) -> None:
    assert can_continue({**SOUND, **fields}, chat=False)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"stream": False}, id="no stream"),
        pytest.param({"temperature": "0"}, id="a temperature in words"),
        pytest.param({"temperature": True, "seed": None}, id="no number"),
        pytest.param({"prompt": ["a", "b"]}, id="two prompts"),
        pytest.param({"prompt": []}, id="no prompt"),
        pytest.param({"prompt": [1]}, id="token ids that are not returned"),
        pytest.param({"suffix": "x"}, id="a suffix"),
        pytest.param({"stop": "x"}, id="a stop string"),
        pytest.param({"structured_outputs": {"choice": ["a"]}}, id="a grammar"),
        pytest.param({"stream_interval": 8}, id="several tokens in an event"),
        pytest.param({"logprobs": 0}, id="the log-probability of each token"),
        pytest.param({"logprobs": False}, id="a number of log-probabilities that is written as false"),
    ],
)
def test_requests_that_are_not_sound(fields: dict[str, Any]) -> None:
    assert not can_continue({**SOUND, **fields}, chat=False)


@pytest.mark.parametrize(
    ("messages", "sound"),
    [
        ([{"role": "user", "content": "a"}], True),
        ([{"role": "user", "content": [{"type": "image_url"}]}], False),
        ([{"role": "assistant", "content": "a"}], False),
        ([], False),
        (["a"], False),
        (None, False),
    ],
)
def test_chats_of_text_alone_are_sound(messages: Any, sound: bool) -> None:
    fields = {"messages": messages, "stream": True, "temperature": 0}
    assert can_continue(fields, chat=True) is sound
    assert not can_continue({**fields, "tools": [{}]}, chat=True)


@pytest.mark.parametrize(
    ("output", "limits"),
    [
        pytest.param(deliver("a", finish_reason="stop"), {}, id="the engine had finished"),
        pytest.param(deliver("a", "b"), {"max_tokens": 2}, id="all tokens came"),
        pytest.param(DeliveredOutput(chat=False, as_ids=False), {}, id="nothing was read"),
    ],
)
def test_there_is_no_request_for_a_rest_that_does_not_exist(
    output: DeliveredOutput, limits: dict[str, int]
) -> None:
    assert build_continued_body(json.dumps({**SOUND, **limits}).encode(), output, chat=False) is None


@pytest.mark.parametrize(
    ("fields", "name", "left"),
    [
        ({"max_tokens": 9}, "max_tokens", 7),
        ({"max_completion_tokens": 9, "max_tokens": 3}, "max_completion_tokens", 7),
        ({"max_tokens": 9, "min_tokens": 1}, "min_tokens", 0),
    ],
)
def test_limits_of_tokens_are_reduced(fields: dict[str, int], name: str, left: int) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], **fields}
    body = build_continued_body(json.dumps(chat).encode(), deliver("a", "b", chat=True), chat=True)
    assert body is not None
    assert json.loads(body)[name] == left


def test_a_completion_without_a_limit_gets_the_rest_of_the_default() -> None:
    body = build_continued_body(json.dumps(SOUND).encode(), deliver("a", "b"), chat=False)
    assert body is not None
    assert json.loads(body) == {**SOUND, "prompt": "pab", "max_tokens": 14}


def test_the_text_of_a_long_stream_is_kept_without_its_events() -> None:
    output = deliver(*["word "] * 1_000)
    output.read()
    assert (output.kept_bytes, output.tokens) == (5_000, 1_000)


def test_prompt_ids_and_the_opening_of_a_second_engine_are_dropped() -> None:
    stream = ContinuedStream(_read(deliver("a", chat=True)))
    opening = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    second = {
        "prompt_token_ids": [1],
        "choices": [{"index": 0, "delta": {"role": "assistant", "content": "b"}}],
    }
    framed = [frame_chunk(b"data: " + json.dumps(e).encode() + b"\n\n") for e in (opening, second)]
    rewritten = stream.rewrite(b"".join(framed))
    line = rewritten.split(b"data: ")[1].split(b"\n\n")[0]
    assert json.loads(line) == {
        "prompt_token_ids": None,
        "choices": [{"index": 0, "delta": {"content": "b"}}],
        "id": "x",
        "created": 7,
    }
    assert rewritten.count(b"data: ") == 1


COMPLETION_OF_VLLM = (
    rb'data: {"id":"x","created":5,"model":"m","choices":[{"index":0,"text":"a\"\n",'
    rb'"logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]}'
)
CHAT_OF_VLLM = (
    rb'data: {"id":"x","created":5,"model":"m","choices":[{"index":0,"delta":'
    rb'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}',
    rb'data: {"id":"x","created":5,"model":"m","choices":[{"index":0,"delta":'
    rb'{"content":"hi"},"logprobs":null,"finish_reason":null,"token_ids":null}]}',
)


@pytest.mark.parametrize(
    ("events", "chat", "text"),
    [((COMPLETION_OF_VLLM,), False, 'a"\n'), (CHAT_OF_VLLM, True, "hi")],
    ids=["completion", "chat"],
)
def test_events_are_read_as_vllm_writes_them(events: tuple[bytes, ...], chat: bool, text: str) -> None:
    output = DeliveredOutput(chat=chat, as_ids=False)
    for event in events:
        output.add(frame_chunk(event + b"\n\n"))
    output.read()
    assert (output.is_readable, output.text, output.tokens) == (True, text, 1)
