"""`fulcrum bounds` prints the bounds of a recorded workload, from files only."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fulcrum_cli.__main__ import main

Bounds = Callable[..., tuple[int, str]]


@pytest.fixture
def bounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Bounds:
    """Return a function that runs the command on 50 equal requests; later options replace earlier ones."""
    trace = tmp_path / "trace.csv"
    rows = (f"{at},1000,51" for at in range(50))
    trace.write_text("\n".join(["arrival_s,input_tokens,output_tokens", *rows]))

    def run(*options: str) -> tuple[int, str]:
        fixed = ("--instances", "2", "--profile", "laptop", "--slo-ttft", "3s", "--slo-tpot", "100ms")
        with pytest.raises(SystemExit) as exited:
            main(["bounds", "--trace", str(trace), *fixed, *options])
        out, err = capsys.readouterr()
        return int(exited.value.code or 0), out + err

    return run


def test_the_table_names_the_workload_each_bound_and_the_lowest(bounds: Bounds) -> None:
    assert bounds() == (
        0,
        """\
50 requests (Fulcrum layout), 1.02 a second as recorded; 2 × laptop
90 % within TTFT 3.00 s and TPOT 100 ms

RATE OF              REQUESTS/S   WHAT LIMITS
fluid work           3.4          all requests served: the work fits the instances
heaviest refused     3.77         the heaviest requests refused: the work of the others fits the instances
prefill burst        14.2         bursts of prompts, each within the TTFT objective
decode burst         no limit     bursts of output, each within both objectives
FCFS prefill         9.97         no bound: prompts first come, first served on all instances, no decode
FCFS, late refused   11.1         no bound: the same, prompts that would be late are refused

highest rate if all are served: 3.4; if some may be refused: 3.77
""",
    )


def test_the_document_holds_rates_of_full_precision_and_null_for_none(bounds: Bounds) -> None:
    code, output = bounds("-o", "json", "--instances", "1000")
    document = json.loads(output)
    rates = {row["name"]: row["ratePerSecond"] for row in document["bounds"]}
    assert (code, document["attainmentPercent"], document["slo"]) == (
        0,
        90,
        {"ttftSeconds": 3, "tpotSeconds": 0.1},
    )
    assert (rates["fluid work"] > 1000, rates["prefill burst"], rates["FCFS prefill"]) == (True, None, None)


def test_resplit_adds_the_best_fixed_and_moving_splits(bounds: Bounds) -> None:
    lines = bounds("--resplit", "10s", "--instances", "3")[1].splitlines()
    assert [line[:12].strip() for line in lines[10:12]] == ["fixed split", "moving split"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--instances", "0"), "error: --instances (0) must be between 1 and 1024\n"),
        (("--instances", "999999999"), "error: --instances (999999999) must be between 1 and 1024\n"),
        (
            ("--resplit", "1ms", "--instances", "8"),
            "error: interval of the moving split (1ms) is too short: 49 s of arrivals and 8 instances make "
            "more than 100,000 splits to compute\n",
        ),
        (("--slo-ttft", "3"), "error: --slo-ttft (3) has no unit: write 3s, 3m or 3ms\n"),
        (("--slo-tpot", "0s"), "error: --slo-tpot (0s) must be longer than 0s\n"),
        (("--attainment", "101"), "error: --attainment (101.0) must be above 0 and at most 100\n"),
        (("--trace", "nowhere.csv"), "error: nowhere.csv (missing) must be a file that exists\n"),
        (("--resplit", "0s"), "error: --resplit (0s) must be longer than 0s\n"),
        (("--prefix-cache",), "error: workload (no block ids) must have them to count prefix hits\n"),
        (("-o", "xml"), "error: --output (xml) is not one of json, yaml\n"),
    ],
)
def test_a_bad_option_is_one_line(bounds: Bounds, options: tuple[str, ...], message: str) -> None:
    assert bounds(*options) == (2, message)
