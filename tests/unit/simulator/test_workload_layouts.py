"""Published layouts are recognised by their fields, and arrivals become seconds since the first request."""

import gzip
from pathlib import Path

import pytest

from fulcrum_core.errors import InvalidInput
from fulcrum_simulator.workload import Trace, WorkloadRequest, load_trace
from fulcrum_simulator.workload.record_files import LINE_LENGTH_MAX


def write(folder: Path, *lines: str) -> Path:
    path = folder / "trace"
    path.write_text("\n".join(lines) + "\n")
    return path


BURST_GPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
BURST_GPT_3 = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        pytest.param(
            (
                "TIMESTAMP,ContextTokens,GeneratedTokens",
                "2023-11-16 18:17:03.9799600,4808,10",
                "2023-11-16 18:17:04.0319600,3180,8",
            ),
            Trace("Azure", (WorkloadRequest(0.0, 4808, 10), WorkloadRequest(0.052, 3180, 8)), 0),
            id="Azure 2023",
        ),
        pytest.param(
            (
                "TIMESTAMP,ContextTokens,GeneratedTokens",
                "2024-05-10 23:59:59.500000+00:00,200,20",
                "2024-05-11 00:00:10+00:00,300,30",
            ),
            Trace("Azure", (WorkloadRequest(0.0, 200, 20), WorkloadRequest(10.5, 300, 30)), 0),
            id="Azure 2024",
        ),
        pytest.param(
            (BURST_GPT, "5,ChatGPT,472,18,490,Conversation log", "45,GPT-4,1087,230,1317,API log"),
            Trace("BurstGPT", (WorkloadRequest(0.0, 472, 18), WorkloadRequest(40.0, 1087, 230)), 0),
            id="BurstGPT",
        ),
        pytest.param(
            (
                BURST_GPT_3,
                "19440110.0,1722ac82-0a46-4bf0-aa08-89794e7a2b3f,43,GPT-4,906,446,1352,Conversation log",
                "19440161.5,d5983bf9-4b48-497b-892b-a58995247443,2,ChatGPT,36,29,65,Conversation log",
            ),
            Trace("BurstGPT", (WorkloadRequest(0.0, 906, 446), WorkloadRequest(51.5, 36, 29)), 0),
            id="BurstGPT with sessions",
        ),
        pytest.param(
            ("request_id,timestamp,input_tokens,output_tokens", "0,0.5,10,20", "1,1.25,15,25"),
            Trace("ServeGen", (WorkloadRequest(0.0, 10, 20), WorkloadRequest(0.75, 15, 25)), 0),
            id="ServeGen",
        ),
        pytest.param(
            (
                '{"timestamp": 3000, "input_length": 600, "output_length": 4, "hash_ids": [7, 8]}',
                '{"timestamp": 3277, "input_length": 28, "output_length": 445, "hash_ids": []}',
            ),
            Trace("Mooncake", (WorkloadRequest(0.0, 600, 4, (7, 8)), WorkloadRequest(0.277, 28, 445)), 0),
            id="Mooncake",
        ),
        pytest.param(
            ('{"chat_id": 159, "timestamp": 61.5, "input_length": 521, "output_length": 132, "turn": 2}',),
            Trace("Qwen Bailian", (WorkloadRequest(0.0, 521, 132),), 0),
            id="Qwen Bailian, whose timestamps are seconds",
        ),
    ],
)
def test_a_published_layout_is_recognised(tmp_path: Path, lines: tuple[str, ...], expected: Trace) -> None:
    loaded = load_trace(write(tmp_path, *lines))
    rounded = [round(request.arrival_s, 6) for request in loaded.requests]
    assert (loaded.layout, rounded, loaded.failed) == (
        expected.layout,
        [request.arrival_s for request in expected.requests],
        0,
    )
    assert [(r.input_tokens, r.output_tokens, r.prefix_hash_ids) for r in loaded.requests] == [
        (r.input_tokens, r.output_tokens, r.prefix_hash_ids) for r in expected.requests
    ]


def test_requests_that_burst_gpt_marks_as_failed_are_left_out_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path, BURST_GPT, "5,GPT-4,0,0,0,API log", "7,GPT-4,10,3,13,API log")
    assert load_trace(path) == Trace("BurstGPT", (WorkloadRequest(2.0, 10, 3),), failed=1)


def test_our_own_arrivals_keep_their_start(tmp_path: Path) -> None:
    path = write(tmp_path, "arrival_s,input_tokens,output_tokens", "2.5,1,1")
    assert load_trace(path) == Trace("Fulcrum", (WorkloadRequest(2.5, 1, 1),), 0)


def test_json_lines_may_be_packed_and_hold_empty_lines(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    line = '{"timestamp": 0, "input_length": 1, "output_length": 1}'
    path.write_bytes(gzip.compress(f"{line}\n\n{line}\n".encode()))
    assert len(load_trace(path).requests) == 2


MOONCAKE = '{"timestamp": 0, "input_length": 1, "output_length": 1}'


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        pytest.param(
            ('{"request_id": 0, "type": "text", "input_length": 61, "output_length": 2370}',),
            ":1 (request_id, type, input_length, output_length) "
            "must hold the field timestamp of the Mooncake layout",
            id="ServeGen's offline jobs have no arrivals",
        ),
        pytest.param(
            ("TIMESTAMP,ContextTokens,GeneratedTokens", "yesterday,1,1"),
            ":2 TIMESTAMP (yesterday) must be a date and time",
            id="no date",
        ),
        pytest.param(
            ("TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:17:04,1,0"),
            ":2 GeneratedTokens (0) must be at least 1 token",
            id="only BurstGPT marks failures by 0 tokens",
        ),
        pytest.param((MOONCAKE, "[]"), ":2 ([]) must be a JSON object", id="an array"),
        pytest.param((MOONCAKE, "{"), ":2 ({) must be a JSON object", id="no JSON"),
        pytest.param(
            (MOONCAKE, "[" * 100_000), f":2 ({'[' * 60}…) must be a JSON object", id="JSON without an end"
        ),
        pytest.param(
            (MOONCAKE, '{"timestamp": NaN, "input_length": 1, "output_length": 1}'),
            ":2 timestamp (nan) must be a finite number of milliseconds",
            id="NaN time",
        ),
        pytest.param(
            (MOONCAKE, '{"timestamp": 1, "input_length": true, "output_length": 1}'),
            ":2 input_length (True) must be a whole number of tokens",
            id="a length that is no number",
        ),
        pytest.param(
            (MOONCAKE, '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [null]}'),
            ":2 hash_ids ([None]) must be whole numbers",
            id="a block id that is no number",
        ),
        pytest.param(
            ("x" * (LINE_LENGTH_MAX + 1),),
            f":1 ({'x' * 60}…) must be at most {LINE_LENGTH_MAX} characters long",
            id="a line without an end",
        ),
    ],
)
def test_an_invalid_file_is_rejected_in_one_line(
    tmp_path: Path, lines: tuple[str, ...], message: str
) -> None:
    path = write(tmp_path, *lines)
    with pytest.raises(InvalidInput) as caught:
        load_trace(path)
    assert str(caught.value) == f"{path}{message}"


def test_a_file_with_too_many_requests_is_rejected(tmp_path: Path) -> None:
    path = write(tmp_path, MOONCAKE, MOONCAKE, MOONCAKE)
    with pytest.raises(InvalidInput, match=r":3 \(3\) is above the limit of 2 requests"):
        load_trace(path, requests_max=2)


MOONCAKE_REQUEST = '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": %s}'


@pytest.mark.parametrize("ids", ["[1e400]", "[1.5]", "[true]", '["1"]', "1e400"])
def test_block_ids_must_be_whole_numbers(tmp_path: Path, ids: str) -> None:
    path = write(tmp_path, MOONCAKE_REQUEST % ids)
    with pytest.raises(InvalidInput, match=r"trace:1 hash_ids \(.*\) must be whole numbers$"):
        load_trace(path)


def test_block_ids_are_at_most_as_many_as_tokens(tmp_path: Path) -> None:
    path = write(tmp_path, MOONCAKE_REQUEST % "[1]", MOONCAKE_REQUEST % "[1, 2]")
    with pytest.raises(
        InvalidInput, match=r"trace:2 hash_ids \(.*\) must be at most one id for each of the 1 "
    ):
        load_trace(path)


def test_a_file_with_very_many_block_ids_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fulcrum_simulator.workload.traces.BLOCK_IDS_MAX", 2)
    path = write(tmp_path, *(3 * [MOONCAKE_REQUEST % "[1]"]))
    with pytest.raises(InvalidInput, match=r"trace:3 hash_ids \(.*\) makes more than 2 ids in the file"):
        load_trace(path)


def test_blank_lines_before_the_first_object_are_skipped(tmp_path: Path) -> None:
    path = write(tmp_path, "", "  ", MOONCAKE_REQUEST % "[1]", "{")
    with pytest.raises(InvalidInput, match=r"trace:4 \({\) must be a JSON object$"):
        load_trace(path)
