"""Measures `fulcrum play`: each case runs it without a screen and compares its figures with bars.

    python bench/play.py CASE [--seed N] [--for SECONDS] [--trace FILE]

* moving: the load whose mix changes, mode Auto and then Off with the same seed
* seeds: the same load, mode Auto, with the given seed and the four after it
* dispatch: the moving load, requests waiting in the router and then in the engines with the same seed
* steady: a load that needs no flip
* trace: a recording at four times its speed; FILE, or azure_code_2023.csv.gz in the folder FULCRUM_TRACES
* flips: 1500 flips, each forced when the router has acknowledged the one before, under the changing load
* kill: the moving load while an engine is killed every 5 s

Exit code 1 if a bar is missed. Nothing else should run on the machine meanwhile.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

PLAY = Path(__file__).parents[1] / "examples" / "play.yaml"
RECORDING = "azure_code_2023.csv.gz"
DIRECT = "direct.yaml"
"""The service of `fulcrum play` with mode Direct and without deflection, in the folder of the report."""
FLIPS = 1500
"""Enough for the load to run most of the time: the first 300 end before its first responses."""
SEEDS, MEAN_MIN, WORST_MIN = 5, 0.92, 0.88
"""Runs of the case seeds, and the least mean and worst SLO attainment."""
SETTLING_TIME_S = 10.0
"""The first split is arbitrary; flips under a steady load count after this time."""

Report = dict[str, Any]
Verdict = tuple[bool, str]


@dataclass(frozen=True, slots=True)
class Case:
    """One or more runs with these additional options, and the check of their reports."""

    runs: tuple[tuple[str, ...], ...]
    judge: Callable[..., Iterable[Verdict]]
    rising_seeds: bool = False
    """Whether each run has the seed after that of the one before, and not the same one."""


def judge_requests(report: Report) -> Iterable[Verdict]:
    """Check that each request has an outcome, none is wrong, and the machine kept up."""
    requests = report["requests"]
    ended = sum(requests[ending] for ending in ("ok", "refused", "failed", "broken", "wrong"))
    requests_text = f"{requests['failed']} failed, {requests['wrong']} wrong of {requests['offered']}"
    yield requests["failed"] == requests["wrong"] == 0, requests_text
    yield requests["offered"] == ended, f"{requests['offered'] - ended} not accounted for"
    yield not report["machine_too_slow"], f"engine lateness {report['engine_lateness_p99_ms']} ms (p99)"


def judge_moving(auto: Report, off: Report) -> Iterable[Verdict]:
    """Check that flips follow the load and that SLO attainment is above that of mode Off."""
    yield from judge_requests(auto)
    yield from judge_requests(off)
    to = [flip["to"] for flip in auto["flips"]]
    counts = to.count("Prefill"), to.count("Decode")
    yield min(counts) >= 2, f"{counts[0]} flips to Prefill, {counts[1]} to Decode"
    shares = auto["attainment"], off["attainment"]
    yield shares[0] - shares[1] >= 0.1, f"attainment {shares[0]:.1%} with Auto, {shares[1]:.1%} with Off"


def judge_seeds(*reports: Report) -> Iterable[Verdict]:
    """Check the mean and the worst SLO attainment."""
    for report in reports:
        yield from judge_requests(report)
    shares = [report["attainment"] for report in reports]
    found = f"attainment {', '.join(f'{share:.1%}' for share in shares)}, mean {fmean(shares):.1%}"
    yield fmean(shares) >= MEAN_MIN and min(shares) >= WORST_MIN, found


def judge_dispatch(queue: Report, direct: Report) -> Iterable[Verdict]:
    """Check that SLO attainment is not below that of mode Direct without deflection."""
    yield from judge_requests(queue)
    yield from judge_requests(direct)
    shares = queue["attainment"], direct["attainment"]
    yield shares[0] >= shares[1], f"attainment {shares[0]:.1%} with Queue, {shares[1]:.1%} with Direct"


def judge_steady(report: Report) -> Iterable[Verdict]:
    """Check that a steady load causes at most one flip."""
    yield from judge_requests(report)
    late = sum(flip["at_s"] > SETTLING_TIME_S for flip in report["flips"])
    yield late <= 1, f"{late} flips after the first {SETTLING_TIME_S:g} s, {len(report['flips'])} in all"


def judge_trace(report: Report) -> Iterable[Verdict]:
    """Check that a recorded load causes flips."""
    yield from judge_requests(report)
    yield bool(report["flips"]), f"{len(report['flips'])} flips, attainment {report['attainment']:.1%}"


def judge_flips(report: Report) -> Iterable[Verdict]:
    """Check the time from the decision to the router's acknowledgement."""
    yield from judge_requests(report)
    forced = [flip for flip in report["flips"] if flip["ack_ms"] is not None]
    yield len(forced) >= FLIPS, f"{len(forced)} flips acknowledged"
    yield report["flip_ack_p99_ms"] <= 20.0, f"acknowledged within {report['flip_ack_p99_ms']} ms (p99)"


def judge_kill(report: Report) -> Iterable[Verdict]:
    """Check that requests fail only after their first byte, and then with an error event."""
    yield from judge_requests(report)
    requests = report["requests"]
    broken_text = f"{requests['broken']} broken, {requests['broken_silently']} of them without an error event"
    yield requests["broken_silently"] == 0, broken_text


CASES = {
    "moving": Case((("--mode", "Auto"), ("--mode", "Off")), judge_moving),
    "seeds": Case((("--load", "moving"),) * SEEDS, judge_seeds, rising_seeds=True),
    "dispatch": Case(((), ("--file", DIRECT)), judge_dispatch),
    "steady": Case((("--load", "steady"),), judge_steady),
    "trace": Case((("--speed", "4"),), judge_trace),
    "flips": Case((("--mode", "Off", "--flips", str(FLIPS)),), judge_flips),
    "kill": Case((("--kill-every", "5s"),), judge_kill),
}


def write_direct(path: Path) -> None:
    """Write the manifest of `fulcrum play` with requests that wait in the engines."""
    manifest = yaml.safe_load(PLAY.read_text(encoding="utf-8"))
    manifest["spec"]["router"]["dispatch"] = {"mode": "Direct", "deflect": False}
    path.write_text(yaml.safe_dump(manifest), encoding="utf-8")


def run_play(*options: str) -> Report:
    """Run once and return the report; print its output except the flips."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        if DIRECT in options:
            write_direct(Path(folder) / DIRECT)
            options = tuple(str(Path(folder) / DIRECT) if part == DIRECT else part for part in options)
        command = [sys.executable, "-m", "fulcrum_cli", "play", "--headless", "--json", str(path), *options]
        print(f"fulcrum {' '.join(command[3:5])} {' '.join(options)}", flush=True)
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        print("\n".join(line for line in ended.stdout.splitlines() if "→" not in line), flush=True)
        if ended.returncode:
            sys.exit(ended.returncode)
        report: Report = json.loads(path.read_text(encoding="utf-8"))
        return report


def print_verdicts(verdicts: Iterable[Verdict]) -> int:
    """Print one line per bar; return the exit code: 1 if a bar is missed."""
    listed = list(verdicts)
    print()
    for held, found in listed:
        print(f"{'ok    ' if held else 'MISSED'}  {found}")
    return 0 if all(held for held, _ in listed) else 1


def main() -> int:
    """Run the case and judge it; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--for", dest="seconds", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--trace", type=Path, default=Path(os.environ.get("FULCRUM_TRACES", ".")) / RECORDING)
    given = parser.parse_args()
    common = []
    if given.case != "flips":  # which takes as long as its flips
        common += ["--for", f"{given.seconds:g}s"]
    if given.case == "trace":
        common += ["--trace", str(given.trace)]
    case = CASES[given.case]
    reports = (
        run_play(*options, *common, "--seed", str(given.seed + number * case.rising_seeds))
        for number, options in enumerate(case.runs)
    )
    return print_verdicts(case.judge(*reports))


if __name__ == "__main__":
    sys.exit(main())
