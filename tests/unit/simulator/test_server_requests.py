"""What the engine server reads: bodies, hand-off parameters and faults."""

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulcrum_simulator.engine import ExportKv, ImportKv, KvExport, NoHandoff
from fulcrum_simulator.server.faults import Fault, FaultKind, parse_fault
from fulcrum_simulator.server.handoff import answer_params, read_handoff
from fulcrum_simulator.server.requests import Ask, Refused, parse_ask, parse_body
from fulcrum_simulator.text import render_chat

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False)
    | st.text("ax<|é", max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("ax<|é", max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    [
        "model",
        "prompt",
        "messages",
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "stream",
        "n",
        "stream_options",
        "priority",
        "cache_salt",
        "kv_transfer_params",
        "temperature",
    ]
)
COMPLETE = {
    "do_remote_prefill": True,
    "remote_block_ids": [[3, 4]],
    "remote_engine_id": "e",
    "remote_request_id": "cmpl-x-0-12345678",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
}


def ask(body: dict[str, Any], *, chat: bool = False) -> Ask:
    """The request that an engine of 100 tokens reads in this body."""
    return parse_ask(body, chat=chat, model="m", max_model_tokens=100)


def test_a_completion_has_defaults_for_all_but_its_prompt() -> None:
    assert ask({"model": "m", "prompt": "abcdefgh"}) == Ask(
        chat=False,
        model="m",
        prompt=b"abcdefgh",
        prompt_tokens=2,
        max_tokens=16,
        stream=False,
        include_usage=False,
        priority=0,
        cache_salt="",
        kv_transfer_params=None,
    )


def test_everything_that_changes_what_the_engine_does_is_read() -> None:
    body = {
        "model": "m",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "!"}]}
        ],
        "max_completion_tokens": 7,
        "max_tokens": 9,
        "stream": True,
        "stream_options": {"include_usage": True},
        "priority": -3,
        "cache_salt": "s",
        "kv_transfer_params": {"do_remote_decode": True},
        "temperature": 0.3,
    }
    prompt = render_chat([{"role": "user", "content": "hi!"}])
    assert ask(body, chat=True) == Ask(
        chat=True,
        model="m",
        prompt=prompt,
        prompt_tokens=-(-len(prompt) // 4),
        max_tokens=7,
        stream=True,
        include_usage=True,
        priority=-3,
        cache_salt="s",
        kv_transfer_params={"do_remote_decode": True},
    )


def test_a_chat_without_a_limit_may_fill_the_model() -> None:
    found = ask({"messages": [{"role": "user", "content": "hi"}]}, chat=True)
    assert found.max_tokens == 100 - found.prompt_tokens


@pytest.mark.parametrize("prompt", [[1, 2, 3], [[1, 2, 3]]])
def test_token_ids_count_as_many_tokens_as_there_are(prompt: list[Any]) -> None:
    assert ask({"prompt": prompt}).prompt_tokens == 3


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"7", b"\xff"])
def test_a_body_that_is_no_object_is_refused(raw: bytes) -> None:
    with pytest.raises(Refused) as refusal:
        parse_body(raw)
    assert refusal.value.status == 400


@given(st.dictionaries(FIELDS, JSON), st.booleans())
def test_any_body_is_either_read_or_refused(body: dict[str, Any], chat: bool) -> None:
    with contextlib.suppress(Refused):
        found = ask(body, chat=chat)
        assert 1 <= found.max_tokens <= 100 - found.prompt_tokens


@given(st.dictionaries(st.sampled_from([*COMPLETE, "do_remote_decode", "other"]), JSON))
def test_any_parameters_can_be_read(params: dict[str, Any]) -> None:
    assert isinstance(read_handoff(params), NoHandoff | ExportKv | ImportKv)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        pytest.param(None, NoHandoff(), id="none"),
        pytest.param({}, NoHandoff(), id="empty"),
        pytest.param({"do_remote_decode": False}, NoHandoff(), id="neither leg"),
        pytest.param({"do_remote_decode": True, "do_remote_prefill": False}, ExportKv(), id="prefill leg"),
        pytest.param(
            COMPLETE | {"field_of_a_later_version": 1},
            ImportKv(
                engine_id="e", request_id="cmpl-x-0-12345678", block_ids=(3, 4), host="10.0.0.1", port=5600
            ),
            id="decode leg",
        ),
        pytest.param(
            {"do_remote_prefill": True},
            ImportKv(engine_id="None", request_id=None, block_ids=None, host="None", port=0),
            id="malformed: kills",
        ),
        pytest.param(
            {name: value for name, value in COMPLETE.items() if name != "remote_request_id"},
            ImportKv(engine_id="e", request_id=None, block_ids=(3, 4), host="10.0.0.1", port=5600),
            id="no request id: hangs",
        ),
        pytest.param(
            COMPLETE | {"remote_block_ids": [3, 4]},
            ImportKv(
                engine_id="e", request_id="cmpl-x-0-12345678", block_ids=None, host="10.0.0.1", port=5600
            ),
            id="blocks without a group: kills",
        ),
        pytest.param(
            COMPLETE | {"remote_port": "x"},
            ImportKv(
                engine_id="e", request_id="cmpl-x-0-12345678", block_ids=(3, 4), host="10.0.0.1", port=0
            ),
            id="no port: never answers",
        ),
    ],
)
def test_parameters_decide_the_place_in_a_hand_off(params: dict[str, Any] | None, expected: object) -> None:
    assert read_handoff(params) == expected


def test_what_a_prefill_leg_answers_is_read_as_its_decode_leg() -> None:
    export = KvExport(request_id="cmpl-a-0-1", block_ids=(7, 9), tokens=30, expires_s=9.0)
    params = answer_params(
        export, engine_id="e", host="10.0.0.2", port=77, tensor_parallel=4, cached_tokens=16
    )
    assert (params["tp_size"], params["remote_prefill_cached_tokens"]) == (4, 16)
    assert read_handoff(params) == ImportKv(
        engine_id="e", request_id="cmpl-a-0-1", block_ids=(7, 9), host="10.0.0.2", port=77
    )


@pytest.mark.parametrize("kind", list(FaultKind))
def test_every_fault_has_a_body_that_switches_it_on(kind: FaultKind) -> None:
    fields = {FaultKind.SLOW: {"factor": 2}}.get(kind, {})
    count = 1 if kind is FaultKind.FAIL_TRANSFERS else 0
    expected = Fault(kind, factor=fields.get("factor", 1.0), count=count)
    assert parse_fault({"kind": kind.value, **fields}) == expected
