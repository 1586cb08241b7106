"""A recorded workload is accepted or rejected as a whole; a rejection names place, value and rule."""

import gzip
from pathlib import Path

import pytest

from fulcrum_core.errors import InvalidInput
from fulcrum_simulator.workload import WorkloadRequest, load_trace

HEADER = "arrival_s,input_tokens,output_tokens"
KNOWN_LAYOUTS = (
    "must hold the fields of one of these layouts: Fulcrum: arrival_s, input_tokens, output_tokens; "
    "Azure: TIMESTAMP, ContextTokens, GeneratedTokens; BurstGPT: Timestamp, Request tokens, Response tokens; "
    "ServeGen: timestamp, input_tokens, output_tokens"
)


def write_trace(folder: Path, *lines: str) -> Path:
    path = folder / "trace.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_plain_file_yields_its_rows_in_order(tmp_path: Path) -> None:
    path = write_trace(tmp_path, HEADER, "0.0,10,2", "0.5,7,1")
    assert load_trace(path).requests == (WorkloadRequest(0.0, 10, 2), WorkloadRequest(0.5, 7, 1))


def test_a_gzip_file_is_read_whatever_its_name(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress(f"{HEADER}\n1,2,3\n".encode()))
    assert load_trace(path).requests == (WorkloadRequest(1.0, 2, 3),)


def test_a_byte_order_mark_before_the_header_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"{HEADER}\n1,2,3\n", encoding="utf-8-sig")
    assert load_trace(path).requests == (WorkloadRequest(1.0, 2, 3),)


def test_columns_may_be_in_any_order_and_optional_ones_are_kept(tmp_path: Path) -> None:
    path = write_trace(
        tmp_path,
        "tenant,output_tokens,prefix_hash_ids,input_tokens,arrival_s",
        "c7,3,0 1 2,9,0.25",
        ",1,,4,1",
    )
    assert load_trace(path).requests == (
        WorkloadRequest(0.25, 9, 3, (0, 1, 2), "c7"),
        WorkloadRequest(1.0, 4, 1),
    )


@pytest.mark.parametrize(
    ("lines", "place", "value", "rule"),
    [
        pytest.param(
            ("arrival_s,input_tokens", "0,1"),
            ":1",
            "arrival_s, input_tokens",
            "must hold the field output_tokens of the Fulcrum layout",
            id="a missing column",
        ),
        pytest.param((), ":1", "empty", KNOWN_LAYOUTS, id="an empty file"),
        pytest.param(
            ("0,1.0,0.8,Gamma,2.0,300",), ":1", "0, 1.0, 0.8, Gamma, 2.0, 300", KNOWN_LAYOUTS, id="rates"
        ),
        pytest.param((HEADER,), "", "0 requests", "must hold at least one request", id="no rows"),
        pytest.param(
            (HEADER, "0,1,1", "nan,1,1"),
            ":3 arrival_s",
            "nan",
            "must be a finite number of seconds",
            id="NaN time",
        ),
        pytest.param(
            (HEADER, "inf,1,1"),
            ":2 arrival_s",
            "inf",
            "must be a finite number of seconds",
            id="infinite time",
        ),
        pytest.param((HEADER, "-1,1,1"), ":2 arrival_s", "-1", "must not be negative", id="negative time"),
        pytest.param(
            (HEADER, "1,1,1", "0.5,1,1"),
            ":3 arrival_s",
            "0.5",
            "must not be earlier than the request before",
            id="unsorted times",
        ),
        pytest.param(
            (HEADER, "0,nan,1"),
            ":2 input_tokens",
            "nan",
            "must be a whole number of tokens",
            id="NaN length",
        ),
        pytest.param(
            (HEADER, "0,-4,1"), ":2 input_tokens", "-4", "must be at least 1 token", id="negative prompt"
        ),
        pytest.param(
            (HEADER, "0,1,-4"), ":2 output_tokens", "-4", "must be at least 1 token", id="negative answer"
        ),
        pytest.param(
            (HEADER, "0,1,2.5"),
            ":2 output_tokens",
            "2.5",
            "must be a whole number of tokens",
            id="half a token",
        ),
        pytest.param(
            (HEADER, "0,1"),
            ":2 output_tokens",
            "empty",
            "must be a whole number of tokens",
            id="truncated row",
        ),
        pytest.param(
            (HEADER, "0,1,1", '1,1,"1'),
            ":3",
            "unexpected end of data",
            "must be CSV",
            id="an unclosed quote",
        ),
        pytest.param(
            (HEADER, f"0,1,{'1' * 200_000}"),
            ":2",
            "field larger than field limit (131072)",
            "must be CSV",
            id="a value longer than the CSV limit",
        ),
        pytest.param(
            (HEADER + ",prefix_hash_ids", "0,1,1,1 x"),
            ":2 prefix_hash_ids",
            "1 x",
            "must be whole numbers",
            id="a block id that is not a number",
        ),
        pytest.param(
            (HEADER, "0,10000001,1"),
            ":2 input_tokens",
            "10000001",
            "must be at most 10000000 tokens",
            id="a prompt that no engine takes",
        ),
        pytest.param(
            (HEADER, f"0,1,{'9' * 4300}"),
            ":2 output_tokens",
            f"{'9' * 60}…",
            "must be at most 10000000 tokens",
            id="a number of thousands of digits",
        ),
        pytest.param(
            (HEADER + ",input_tokens", "0,1,1,2"),
            ":1",
            "input_tokens",
            "must name every column once",
            id="a column twice",
        ),
        pytest.param(
            (HEADER, "0,1,1", "1,1,1,5,6"),
            ":3",
            "5, 6",
            "must not hold more values than the header names",
            id="a row that is too long",
        ),
        pytest.param(
            ("", " ", HEADER, "0,1,1", "1,1,x"),
            ":5 output_tokens",
            "x",
            "must be a whole number of tokens",
            id="lines count from the first one, which may be blank",
        ),
    ],
)
def test_an_invalid_file_is_rejected_with_place_value_and_rule(
    tmp_path: Path, lines: tuple[str, ...], place: str, value: str, rule: str
) -> None:
    path = write_trace(tmp_path, *lines) if lines else tmp_path / "trace.csv"
    path.touch()
    with pytest.raises(InvalidInput) as caught:
        load_trace(path)
    assert str(caught.value) == f"{path}{place} ({value}) {rule}"


def test_the_error_of_a_missing_file_names_it(tmp_path: Path) -> None:
    path = tmp_path / "nowhere.csv"
    with pytest.raises(InvalidInput) as caught:
        load_trace(path)
    assert str(caught.value) == f"{path} (missing) must be a file that exists"


@pytest.mark.parametrize(
    "content", [b"\x1f\x8bnot gzip at all", b"\xff\xfe\x00binary"], ids=["broken gzip", "not text"]
)
def test_a_file_that_is_not_csv_is_rejected_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(content)
    with pytest.raises(InvalidInput, match="must be a readable text file, plain or gzip") as caught:
        load_trace(path)
    assert "\n" not in str(caught.value)
