"""Parsing of request bodies, KV transfer parameters and faults by the engine server."""

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulcrum_simulator.engine import ExportedKv, KvExportRequest, KvImportRequest, NoKvTransfer
from fulcrum_simulator.server.faults import Fault, FaultKind, parse_fault
from fulcrum_simulator.server.kv_transfer_params import build_kv_transfer_params, parse_kv_transfer_params
from fulcrum_simulator.server.requests import (
    GenerateRequest,
    RequestRejected,
    parse_body,
    parse_generate_request,
)
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
COMPLETE_PARAMS = {
    "do_remote_prefill": True,
    "remote_block_ids": [[3, 4]],
    "remote_engine_id": "e",
    "remote_request_id": "cmpl-x-0-12345678",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
}


def parse(body: dict[str, Any], *, chat: bool = False) -> GenerateRequest:
    """Parse this body for an engine of 100 tokens."""
    return parse_generate_request(body, chat=chat, model="m", max_model_tokens=100)


def test_a_completion_has_defaults_for_all_but_its_prompt() -> None:
    assert parse({"model": "m", "prompt": "abcdefgh"}) == GenerateRequest(
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


def test_a_truncated_prompt_keeps_its_last_tokens() -> None:
    parsed = parse({"prompt": "abcdefgh" * 100, "truncate_prompt_tokens": 1, "max_tokens": 1})
    assert (parsed.prompt, parsed.prompt_tokens) == (b"efgh", 1)


def test_every_field_that_affects_the_engine_is_parsed() -> None:
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
    assert parse(body, chat=True) == GenerateRequest(
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
    found = parse({"messages": [{"role": "user", "content": "hi"}]}, chat=True)
    assert found.max_tokens == 100 - found.prompt_tokens


@pytest.mark.parametrize("prompt", [[1, 2, 3], [[1, 2, 3]]])
def test_a_prompt_of_token_ids_has_one_token_per_id(prompt: list[Any]) -> None:
    assert parse({"prompt": prompt}).prompt_tokens == 3


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"7", b"\xff"])
def test_a_body_that_is_not_an_object_is_refused(raw: bytes) -> None:
    with pytest.raises(RequestRejected) as refusal:
        parse_body(raw)
    assert refusal.value.status == 400


@given(st.dictionaries(FIELDS, JSON), st.booleans())
def test_any_body_is_either_parsed_or_rejected(body: dict[str, Any], chat: bool) -> None:
    with contextlib.suppress(RequestRejected):
        found = parse(body, chat=chat)
        assert 1 <= found.max_tokens <= 100 - found.prompt_tokens


@given(st.dictionaries(st.sampled_from([*COMPLETE_PARAMS, "do_remote_decode", "other"]), JSON))
def test_any_kv_transfer_parameters_can_be_parsed(params: dict[str, Any]) -> None:
    assert isinstance(parse_kv_transfer_params(params), NoKvTransfer | KvExportRequest | KvImportRequest)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        pytest.param(None, NoKvTransfer(), id="none"),
        pytest.param({}, NoKvTransfer(), id="empty"),
        pytest.param({"do_remote_decode": False}, NoKvTransfer(), id="neither leg"),
        pytest.param(
            {"do_remote_decode": True, "do_remote_prefill": False}, KvExportRequest(), id="prefill leg"
        ),
        pytest.param(
            COMPLETE_PARAMS | {"field_of_a_later_version": 1},
            KvImportRequest(
                engine_id="e", request_id="cmpl-x-0-12345678", block_ids=(3, 4), host="10.0.0.1", port=5600
            ),
            id="decode leg",
        ),
        pytest.param(
            {"do_remote_prefill": True},
            KvImportRequest(engine_id="None", request_id=None, block_ids=None, host="None", port=0),
            id="malformed: kills",
        ),
        pytest.param(
            {name: value for name, value in COMPLETE_PARAMS.items() if name != "remote_request_id"},
            KvImportRequest(engine_id="e", request_id=None, block_ids=(3, 4), host="10.0.0.1", port=5600),
            id="no request id: hangs",
        ),
        pytest.param(
            COMPLETE_PARAMS | {"remote_block_ids": [3, 4]},
            KvImportRequest(
                engine_id="e", request_id="cmpl-x-0-12345678", block_ids=None, host="10.0.0.1", port=5600
            ),
            id="blocks without a group: kills",
        ),
        pytest.param(
            COMPLETE_PARAMS | {"remote_port": "x"},
            KvImportRequest(
                engine_id="e", request_id="cmpl-x-0-12345678", block_ids=(3, 4), host="10.0.0.1", port=0
            ),
            id="no port: unreachable",
        ),
    ],
)
def test_kv_transfer_parameters_decide_between_export_import_and_none(
    params: dict[str, Any] | None, expected: object
) -> None:
    assert parse_kv_transfer_params(params) == expected


def test_the_parameters_of_a_prefill_leg_parse_as_an_import() -> None:
    export = ExportedKv(request_id="cmpl-a-0-1", block_ids=(7, 9), tokens=30, expires_s=9.0)
    params = build_kv_transfer_params(
        export, engine_id="e", host="10.0.0.2", port=77, tensor_parallel=4, cached_tokens=16
    )
    assert (params["tp_size"], params["remote_prefill_cached_tokens"]) == (4, 16)
    assert parse_kv_transfer_params(params) == KvImportRequest(
        engine_id="e", request_id="cmpl-a-0-1", block_ids=(7, 9), host="10.0.0.2", port=77
    )


@pytest.mark.parametrize("kind", list(FaultKind))
def test_every_fault_has_a_body_that_switches_it_on(kind: FaultKind) -> None:
    with_factor = (FaultKind.SLOW, FaultKind.SLOW_TRANSFERS)
    fields = {"factor": 2} if kind in with_factor else {}
    count = 1 if kind is FaultKind.FAIL_TRANSFERS else 0
    expected = Fault(kind, factor=fields.get("factor", 1.0), count=count)
    assert parse_fault({"kind": kind.value, **fields}) == expected
