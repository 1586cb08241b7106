"""The simulated runs of `scheduling` and the search for the highest rates; not a measurement of its own.

`bench/scheduling.py` calls `measure` for each workload and policy, and computes its figures from the rates.
Rates are tried on a grid, a constant ratio from one to the next. Every run is stored, in a file if there is
one: a search at another SLO attainment reuses the runs of that policy, and a measurement that was stopped
goes on where it was.
"""

import hashlib
import json
import math
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median_low
from typing import NamedTuple

from fulcrum_core.profiles import load_profile
from fulcrum_core.values import Slo
from fulcrum_simulator.bounds import UniformFleet, find_best_fixed_split
from fulcrum_simulator.fleet.load import ComposedLoad, Load, RecordedLoad, leave_out_overlong
from fulcrum_simulator.fleet.options import RunOptions, list_splits, parse_policy
from fulcrum_simulator.fleet.report import build_report
from fulcrum_simulator.fleet.run import simulate
from fulcrum_simulator.workload import COMPOSED, load_trace

INSTANCES, PROFILE, SLO = 8, "l70-h100-tp4", Slo(ttft_s=3.0, tpot_s=0.1)
BEST_STATIC = "static:best"
"""With a suffix for the dispatch, as other policies."""
WORKLOADS = "scheduling_workloads.toml"
SIMULATED = "autoscaler", "core", "router", "simulator"
"""Folders of the packages that a run uses."""
STRIDE_FAR, STRIDE_NEAR = 4, 1
"""First step on the grid: of the first seed, and of each further one, which starts where another ended."""
FACTORS = 2.0**-6, 2.0**8
"""Lowest and highest factor of a workload's rate that is tried."""


@dataclass(frozen=True)
class Workload:
    """One workload of the list."""

    name: str
    use: str
    moving: bool
    smooth: bool
    near: float = 1.0
    """Factor near which the rates of good policies lie: a run far above it costs the most time."""
    trace: str = ""
    """File of the trace, if that is not the name."""
    part: Sequence[float] = (0.0, math.inf)
    """The seconds of a trace that count, from and to."""

    @property
    def recorded(self) -> bool:
        """Whether it is a trace, for which a folder must be given."""
        return self.name not in COMPOSED


class Run(NamedTuple):
    """Result of one run.

    `below`: the attainment that the run missed (a run is ended once that is sure); 0 if it met it.
    `scored_flips`: those after the warm-up that is not scored.
    """

    attainment: float
    below: float
    rate_rps: float
    scored_flips: int
    token_share: float

    def meets(self, required: float) -> bool | None:
        """Whether the run meets this attainment; None: it was ended too early to tell."""
        if self.below:
            return False if required >= self.below else None
        return self.attainment >= required


class RunKey(NamedTuple):
    """Identifies a run: `factor` of the workload's rate, with six digits."""

    workload: str
    policy: str
    seed: int
    factor: str


@cache
def hash_sources() -> str:
    """Hash what decides a run: the sources and profiles of the packages that it uses, and the workloads."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    found = [p for package in SIMULATED for p in (root / package).rglob("*") if p.suffix in (".py", ".yaml")]
    for path in (*sorted(found), Path(__file__), Path(__file__).with_name(WORKLOADS)):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


class RunStore:
    """All runs so far, and those that were in the file when it was opened, if they are of this code."""

    def __init__(self, path: Path | None, code: str) -> None:
        self._path, self._code = path, code
        self._runs: dict[RunKey, Run] = {}
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                if entry.get("code") == code:
                    self._add(RunKey(**entry["key"]), Run(**entry["run"]))

    def _add(self, key: RunKey, run: Run) -> None:
        known = self._runs.get(key)
        if known is None or run.below < known.below:
            self._runs[key] = run

    def find(self, key: RunKey) -> Run | None:
        """Return the run of this key that ran longest (smallest `below`)."""
        return self._runs.get(key)

    def record(self, key: RunKey, run: Run) -> None:
        """Store a run, in the file by one write of a line: several processes append to it."""
        self._add(key, run)
        if self._path is not None:
            line = json.dumps({"code": self._code, "key": key._asdict(), "run": run._asdict()}) + "\n"
            with self._path.open("ab", buffering=0) as file:
                file.write(line.encode())


@dataclass(frozen=True)
class Task:
    """One policy on one workload: its highest rates at each of the attainments, for all seeds.

    `ratio`: between two rates of the grid.
    """

    workload: Workload
    policy: str
    attainments: tuple[float, ...]
    seeds: int
    ratio: float
    traces: Path | None
    runs: Path | None


@dataclass(frozen=True)
class Measured:
    """Rates and flips of a policy at one attainment, by seed."""

    policy: str
    rates_rps: tuple[float, ...]
    flips: tuple[int, ...]
    token_shares: tuple[float, ...]


def make_load(workload: Workload, traces: Path | None) -> Load:
    """Return the composed workload, or load the trace."""
    profile = load_profile(PROFILE)
    if not workload.recorded:
        return ComposedLoad(workload.name, profile)
    assert traces is not None, workload.name
    recorded, _ = leave_out_overlong(load_trace(traces / (workload.trace or workload.name)).requests, profile)
    first_s, last_s = workload.part
    part = [request for request in recorded if first_s <= request.arrival_s < last_s]
    return RecordedLoad(workload.name, [replace(r, arrival_s=r.arrival_s - first_s) for r in part])


def make_options(policy: str) -> RunOptions:
    """Return the options of a run."""
    return RunOptions(
        profile=load_profile(PROFILE),
        instances=INSTANCES,
        policy=parse_policy(policy, instances=INSTANCES),
        slo=SLO,
    )


def read_workloads(use: str) -> list[Workload]:
    """Read the list."""
    path = Path(__file__).with_name(WORKLOADS)
    listed = [Workload(**entry) for entry in tomllib.loads(path.read_text(encoding="utf-8"))["workload"]]
    return [workload for workload in listed if workload.use == use]


def measure(task: Task) -> dict[float, Measured]:
    """Find the highest rates with each seed, by attainment; for `static:best`, those of the best split."""
    search = _Search(task)
    found: dict[float, Measured] = {}
    first = 0
    for attainment in sorted(task.attainments):
        policy = task.policy
        if policy.startswith(BEST_STATIC):
            policy, first = search.find_best_split(attainment, first)
        stride = STRIDE_NEAR if policy != task.policy else STRIDE_FAR
        best, first = search.find_highest_runs(policy, attainment, first, stride)
        found[attainment] = Measured(
            policy,
            tuple(run.rate_rps for run in best),
            tuple(run.scored_flips for run in best),
            tuple(run.token_share for run in best),
        )
    return found


_NOTHING = Run(0.0, 0.0, 0.0, 0, 0.0)
"""No rate meets the attainment."""


class _Search:
    """Runs of one task. Place n on the grid is the factor near · ratio**n of the workload's rate."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._load = make_load(task.workload, task.traces)
        self._store = RunStore(task.runs, hash_sources())
        self._best_prefill: int | None = None

    def find_highest(self, policy: str, seed: int, attainment: float, first: int, stride: int) -> int | None:
        """Return the highest place at which the policy meets the attainment and that after it does not."""

        def meets(place: int) -> bool | None:
            factor = self._factor(place)
            if factor > FACTORS[1]:
                return False
            if factor < FACTORS[0]:
                return None
            return bool(self.run(policy, seed, place, attainment).meets(attainment))

        return find_highest_place(meets, first, stride)

    def find_highest_runs(
        self, policy: str, attainment: float, first: int, stride: int
    ) -> tuple[list[Run], int]:
        """Return the run at the highest place with each seed, and the last of these places."""
        places = self._find_highest_places(policy, attainment, first, stride)
        found = [
            _NOTHING if place is None else self.run(policy, seed, place, attainment)
            for seed, place in enumerate(places, start=1)
        ]
        known = [place for place in places if place is not None]
        return found, known[-1] if known else first

    def _find_highest_places(
        self, policy: str, attainment: float, first: int, stride: int
    ) -> list[int | None]:
        places: list[int | None] = []
        for seed in range(1, self._task.seeds + 1):
            places.append(self.find_highest(policy, seed, attainment, first, stride))
            known = [place for place in places if place is not None]
            if known:
                first, stride = median_low(known), STRIDE_NEAR
        return places

    def find_best_split(self, attainment: float, first: int) -> tuple[str, int]:
        """Return the best fixed split, and the highest place of all splits with seed 1.

        With seed 1 all splits are compared, beginning with the best one at the attainment before, or that of
        the queueing model. A split is better than the best so far if it meets the attainment at the next
        place. Of the best one and those with one prefill instance more or less, that with the highest median
        of all seeds is returned.
        """
        suffix = self._task.policy.removeprefix(BEST_STATIC)
        policies = [f"static:{split.prefill}P{split.decode}D{suffix}" for split in list_splits(INSTANCES)]
        likely = (self._best_prefill or self._guess_prefill(first)) - 1
        in_order = sorted(range(len(policies)), key=lambda index: abs(index - likely))
        best, place = "", None
        for index in in_order:
            policy = policies[index]
            if place is None:
                best, place = policy, self.find_highest(policy, 1, attainment, first, STRIDE_FAR)
            elif self.run(policy, 1, place + 1, attainment).meets(attainment):
                best, place = policy, self.find_highest(policy, 1, attainment, place + 1, STRIDE_NEAR)
        if place is not None and self._task.seeds > 1:
            index = policies.index(best)
            beside = policies[max(0, index - 1) : index] + policies[index + 1 : index + 2]
            best = self._find_best_of_all_seeds([best, *beside], attainment, place)
        self._best_prefill = parse_policy(best, instances=INSTANCES).prefill
        return best, first if place is None else place

    def _find_best_of_all_seeds(self, policies: Sequence[str], attainment: float, first: int) -> str:
        """Return the policy with the highest median of its highest places; of several, the first one.

        Another policy is better than the best so far if most seeds meet the attainment at the place after
        its median. Only then is it searched.
        """
        best, *others = policies
        highest = self._find_median(best, attainment, first)
        for policy in others:
            if self._is_met_by_most(policy, attainment, highest + 1):
                best, highest = policy, self._find_median(policy, attainment, highest + 1)
        return best

    def _find_median(self, policy: str, attainment: float, first: int) -> int:
        """Return the median of the highest places of all seeds."""
        places = self._find_highest_places(policy, attainment, first, STRIDE_NEAR)
        return median_low(self._lowest_place() if place is None else place for place in places)

    def _lowest_place(self) -> int:
        """Return a place below the grid."""
        return math.floor(math.log(FACTORS[0] / self._task.workload.near, self._task.ratio))

    def _is_met_by_most(self, policy: str, attainment: float, place: int) -> bool:
        """Whether most seeds meet the attainment at this place; stops once that is sure."""
        met = missed = 0
        for seed in range(1, self._task.seeds + 1):
            if self.run(policy, seed, place, attainment).meets(attainment):
                met += 1
            else:
                missed += 1
            if 2 * max(met, missed) > self._task.seeds:
                break
        return 2 * met > self._task.seeds

    def _guess_prefill(self, place: int) -> int:
        fleet = UniformFleet(INSTANCES, load_profile(PROFILE), SLO)
        arrivals = self._load.prepare(self._factor(place), slo=fleet.slo, seed=1)
        return find_best_fixed_split(arrivals, fleet).prefill

    def run(self, policy: str, seed: int, place: int, attainment: float) -> Run:
        """Return the run at this place, which is ended once it cannot meet the attainment any more."""
        factor = self._factor(place)
        key = RunKey(self._task.workload.name, policy, seed, f"{factor:.6g}")
        known = self._store.find(key)
        if known is not None and known.meets(attainment) is not None:
            return known
        options = replace(make_options(policy), seed=seed)
        arrivals = self._load.prepare(factor, slo=options.slo, seed=seed)
        result = simulate(arrivals, options, attainment_min=attainment)
        report = build_report(result)
        reached = report["attainment"] or 0.0
        run = Run(
            reached,
            0.0 if reached >= attainment else attainment,
            report["goodput"]["offered_requests_per_s"] or 0.0,
            sum(flip.at_s >= result.first_scored_s for flip in result.flips),
            report["goodput"]["token_share"] or 0.0,
        )
        self._store.record(key, run)
        return run

    def _factor(self, place: int) -> float:
        return float(f"{self._task.workload.near * self._task.ratio**place:.6g}")


def find_highest_place(meets: Callable[[int], bool | None], first: int, stride: int) -> int | None:
    """Return a place that meets the attainment while the next one does not; None if there is none.

    The search starts at `first`; `stride` doubles until both are found. `meets` returns None below the
    grid: the search then ends without a result.
    """
    low: int | None = None
    high: int | None = None
    place = first
    while low is None or high is None or high - low > 1:
        met = meets(place)
        if met is None:
            return None
        if met:
            low = place
        else:
            high = place
        if high is None:
            place += stride
        elif low is None:
            place -= stride
        else:
            place = (low + high) // 2
        if low is None or high is None:
            stride *= 2
    return low


def format_range(values: Sequence[float]) -> str:
    """Return the lowest and the highest value."""
    return f"[{min(values):.2f} {max(values):.2f}]"
