"""`fulcrum simulate` as a process: output by seed, comparisons, search for a rate, plot, wrong options."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fulcrum_cli.web.recording import read_states

TRACE = "arrival_s,input_tokens,output_tokens\n" + "".join(
    f"{second},{500 + second % 7 * 100},{5 + second % 11}\n" for second in range(60)
)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE, encoding="utf-8")
    return path


def run_simulate(*arguments: object, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fulcrum_cli", "simulate", "--profile", "laptop", *map(str, arguments)]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def read_json(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    del document["wall_s"]
    return document


def test_the_same_seed_gives_the_same_json_under_any_hash_seed(trace: Path, tmp_path: Path) -> None:
    documents = []
    for hash_seed in ("1", "2"):
        out = tmp_path / f"{hash_seed}.json"
        run = run_simulate("--trace", trace, "--json", out, "--scale", 3, hash_seed=hash_seed)
        assert (run.returncode, run.stderr) == (0, "")
        documents.append(read_json(out))
    assert documents[0] == documents[1]
    assert documents[0]["runs"][0]["requests"]["offered"] >= 1800


def test_a_comparison_ends_with_one_line_for_each_policy(trace: Path) -> None:
    run = run_simulate("--trace", trace, "--instances", 3, "--compare", "arrow,static:best+direct")
    table = run.stdout.split("\n\n")[-1].splitlines()
    assert (run.returncode, run.stderr) == (0, "")
    assert [line.split()[0].partition(":")[0] for line in table] == ["POLICY", "arrow", "static"]


def test_several_seeds_show_their_spread(trace: Path, tmp_path: Path) -> None:
    out, recording = tmp_path / "out.json", tmp_path / "run.gz"
    options = ("--trace", trace, "--instances", 2, "--seeds", 3, "--seed", 4)
    run = run_simulate(*options, "--json", out, "--record", recording)
    (report,) = read_json(out)["runs"]
    assert (run.returncode, run.stderr) == (0, "")
    assert [each["seed"] for each in report["seeds"]] == [4, 5, 6]
    assert "  3 seeds          SLO attainment " in run.stdout
    assert len(read_states(recording)) >= 60, "the run of the first seed, a state a second"


def test_the_rate_found_keeps_the_bar(tmp_path: Path) -> None:
    out, trace = tmp_path / "out.json", tmp_path / "long.csv"
    rows = "".join(f"{4 * number},5000,10\n" for number in range(30))
    trace.write_text("arrival_s,input_tokens,output_tokens\n" + rows, encoding="utf-8")
    run = run_simulate("--trace", trace, "--instances", 2, "--find-rate", 90, "--json", out)
    (report,) = read_json(out)["runs"]
    assert (run.returncode, run.stderr) == (0, "")
    assert report["attainment"] >= 0.9
    assert f"requests/s at an SLO attainment of 90 % or more ({report['factor']:.3g} x the rate" in run.stdout


def test_no_rate_is_searched_in_a_recording_with_one_time_of_arrival(tmp_path: Path) -> None:
    trace = tmp_path / "burst.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n" + "0,500,5\n" * 20, encoding="utf-8")
    run = run_simulate("--trace", trace, "--find-rate", 90)
    assert (run.returncode, run.stderr.count("\n")) == (2, 1)
    assert "has one time of arrival" in run.stderr
    comparison = run_simulate("--trace", trace, "--compare", "arrow,static:4P4D")
    assert (comparison.returncode, comparison.stderr) == (0, "")


def test_a_composed_workload_takes_the_place_of_a_recording(trace: Path) -> None:
    both = run_simulate("--trace", trace, "--load", "drift")
    assert (both.returncode, both.stderr.count("\n")) == (2, 1)
    run = run_simulate("--load", "stationary", "--scale", 0.02, "--profile", "l70-h100-tp4")
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policy", "best"), "--policy (best)"),
        (("--policy", "static:best+foo"), "a part +foo that is not one of +direct, "),
        (("--instances", "1"), "--instances (1)"),
        (("--scale", "0"), "--scale"),
        (("--scale", 1e-10), "--scale (1e-10) leaves no request of trace.csv"),
        (("--seeds", "0"), "--seeds (0)"),
        (("--check-rates",), "--check-rates (no --find-rate) needs a found rate: pass --find-rate"),
        (("--policy", "arrow", "--compare", "arrow"), "--policy (arrow) cannot be combined with --compare"),
        (("--compare", ""), "--compare () must be names of policies, separated by commas"),
        (("--compare", "arrow,"), "--compare (arrow,) must be names of policies, separated by commas"),
        (("--compare", "arrow,best"), "--compare (best) is not one of arrow,"),
        (("--load", "drift"), "--load (drift) cannot be combined with --trace"),
        (("--json", "/dev/null/x"), "--json (/dev/null/x) must be in a folder that exists"),
        (("--slo-ttft", "3"), "--slo-ttft (3) has no unit"),
        (("--step-noise", "1"), "--step-noise"),
        (("--json", "/nowhere/out.json"), "--json (/nowhere/out.json) must be in a folder that exists"),
        (("--plot", "/nowhere/out.html"), "--plot (/nowhere/out.html) must be in a folder that exists"),
    ],
)
def test_a_bad_option_is_refused_in_one_line(trace: Path, arguments: tuple[str, ...], message: str) -> None:
    run = run_simulate("--trace", trace, *arguments)
    assert (run.returncode, run.stderr.count("\n")) == (2, 1)
    assert message in run.stderr
    assert run.stdout == "", "nothing was simulated before"


def test_a_workload_is_required() -> None:
    error = "error: --trace, --load (neither is given) are the workload: pass one of them\n"
    assert run_simulate().stderr == error


def test_an_output_must_not_replace_the_trace(trace: Path) -> None:
    run = run_simulate("--trace", trace, "--json", trace)
    assert run.stderr == f"error: --json ({trace}) must be another file than --trace\n"
    assert trace.read_text(encoding="utf-8") == TRACE


@pytest.mark.parametrize(
    ("reader", "code", "error"),
    [
        ("| true", 0, ""),
        ("> /dev/full", 2, "error: standard output cannot be written: No space left on device\n"),
    ],
)
def test_files_are_written_though_the_output_cannot_be(
    trace: Path, tmp_path: Path, reader: str, code: int, error: str
) -> None:
    out, recording = tmp_path / "out.json", tmp_path / "run.gz"
    program = f"{sys.executable} -m fulcrum_cli simulate --profile laptop --instances 2"
    command = f"{program} --trace {trace} --json {out} --record {recording} {reader}"
    run = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stderr) == (code, error)
    assert len(read_json(out)["runs"]) == 1
    assert len(read_states(recording)) >= 60


def test_the_figures_are_printed_though_a_file_cannot_be_written(trace: Path) -> None:
    run = run_simulate("--trace", trace, "--instances", 2, "--json", "/dev/full")
    error = "error: --json (/dev/full) cannot be written: No space left on device\n"
    assert (run.returncode, run.stderr) == (2, error)
    assert "SLO attainment" in run.stdout


def test_the_layout_found_in_the_trace_is_named(trace: Path) -> None:
    lines = run_simulate("--trace", trace, "--instances", 2).stdout.splitlines()
    assert lines[0] == "trace.csv: 60 requests (Fulcrum layout), 1.02 a second as recorded"
    assert lines[1].startswith("balanced:1P1D on 2 x laptop")


def test_the_plot_is_one_page_with_a_figure_for_each_policy_and_no_address(
    trace: Path, tmp_path: Path
) -> None:
    pytest.importorskip("plotly", reason="plotly is not installed: it is in the extra `plot`")
    out = tmp_path / "out.html"
    policies = "arrow,static:1P2D"
    run = run_simulate("--trace", trace, "--instances", 3, "--compare", policies, "--plot", out)
    page = out.read_text(encoding="utf-8")
    assert (run.returncode, run.stderr) == (0, "")
    assert (page.count("Plotly.newPlot("), page.count("<script src")) == (2, 0)
