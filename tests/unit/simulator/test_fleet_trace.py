"""Arrow on a recorded workload, against what is published. Skipped unless FULCRUM_TRACES names the folder.

The Arrow paper (arXiv 2505.11916) reports up to 2.55 times the rate of a fixed 4P4D at 90 % attainment.
`make bench NAME=scheduling` finds the rates on the whole recording; its first ten minutes show the same.
"""

import os
from functools import cache
from pathlib import Path

import pytest

from fulcrum_core.profiles import load_profile
from fulcrum_core.values import Slo
from fulcrum_simulator.fleet.load import prepare_load
from fulcrum_simulator.fleet.options import RunOptions, parse_policy
from fulcrum_simulator.fleet.report import build_report
from fulcrum_simulator.fleet.run import simulate
from fulcrum_simulator.workload import load_trace

FOLDER = os.environ.get("FULCRUM_TRACES")
SLO = Slo(ttft_s=3.0, tpot_s=0.1)
PART_S = 600.0
AS_PUBLISHED = "+direct+nodeflect"
"""Published systems know neither a waiting room nor deflection."""

pytestmark = [
    pytest.mark.skipif(FOLDER is None, reason="FULCRUM_TRACES does not name a folder of traces"),
    pytest.mark.timeout(600),
]


@cache
def measure_attainment(policy: str, *, speed: float) -> float:
    assert FOLDER is not None
    whole = load_trace(Path(FOLDER) / "azure_code_2023.csv.gz").requests
    recorded = [request for request in whole if request.arrival_s < PART_S]
    load = prepare_load(recorded, scale=1.0, speed=speed, slo=SLO, seed=1)
    options = RunOptions(
        profile=load_profile("l70-h100-tp4"),
        instances=8,
        policy=parse_policy(policy + AS_PUBLISHED, instances=8),
        slo=SLO,
    )
    attainment: float = build_report(simulate(load, options))["attainment"]
    return attainment


def test_arrow_serves_more_than_twice_the_rate_of_an_even_split() -> None:
    assert measure_attainment("arrow", speed=3.9) >= measure_attainment("static:4P4D", speed=1.9)


def test_arrow_finds_the_best_split_of_a_load_that_does_not_move() -> None:
    arrow, best = (measure_attainment(policy, speed=3.9) for policy in ("arrow", "static:7P1D"))
    assert arrow == pytest.approx(best, abs=0.02)
