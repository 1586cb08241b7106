"""How far the policies are from the best splits for the moving load of `fulcrum play`, by simulation.

    python bench/moving_bound.py [--seeds 1,2,3,4,5] [--for SECONDS] [--tries N]

For each seed it prints the SLO attainment of `arrow`, of `balanced`, of the best fixed split, found by trying
all, and of the best schedule of splits, one for each second, that a search finds: it changes the schedule at
random and keeps what was not worse in a simulation of the whole run. The search knows all arrivals, lengths
and delays; all but the splits is as it ships. More tries find better schedules: the figure is what is known
to be possible, the policies' own runs included, and not a limit. All requests count, as in `fulcrum play`.
"""

import argparse
import random
from collections.abc import Sequence
from statistics import fmean

from fulcrum_cli.manifest_files import find_shipped_manifest, read_manifest
from fulcrum_cli.play.loads import make_load
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.profiles import load_profile
from fulcrum_simulator.fleet.options import RunOptions, list_splits, parse_policy
from fulcrum_simulator.fleet.planners import KnownSplitPlanner
from fulcrum_simulator.fleet.run import simulate
from fulcrum_simulator.workload import WorkloadRequest

INTERVAL_S = 1.0
LENGTHS = (1, 1, 2, 3, 4, 6, 9)
"""Seconds of the schedule that one change may cover."""
PHASE_S = 15
COLUMNS = "arrow", "balanced", "best fixed split", "best known"

Schedule = list[int]
"""Prefill instances at each second."""


class Bound:
    """The load of one seed, and what a run of it attains."""

    def __init__(self, service: PDService, seed: int, seconds: float) -> None:
        spec = service.spec
        assert spec.instances is not None
        self._spec, self._instances, self._seed = spec, spec.instances, seed
        self._load: list[WorkloadRequest] = list(make_load("moving", duration_s=seconds, seed=seed))
        self._steps = int(seconds / INTERVAL_S) + 6
        self._low, self._high = spec.roles.prefill.min, spec.instances - spec.roles.decode.min

    def run(self, policy: str, schedule: Schedule | None = None) -> float:
        """Return the SLO attainment of a policy, or of a schedule in its place."""
        spec = self._spec
        options = RunOptions(
            profile=load_profile(spec.engine.profile),
            instances=self._instances,
            policy=parse_policy(policy, instances=self._instances),
            slo=spec.slo.to_slo(),
            seed=self._seed,
            unscored_share=0.0,
            service=spec,
        )
        planner = None if schedule is None else KnownSplitPlanner(INTERVAL_S, schedule)
        records = simulate(self._load, options, planner=planner).records
        return sum(record.meets(options.slo) for record in records) / len(records)

    def compare(self, tries: int) -> list[float]:
        """Return the attainment of both policies, of the best fixed split, and the best one known."""
        policies = [self.run(policy) for policy in ("arrow", "balanced")]
        fixed = max(self.run(str(split)) for split in list_splits(self._instances))
        return [*policies, fixed, max(*policies, fixed, self._search(tries))]

    def _search(self, tries: int) -> float:
        """Return the attainment of the best schedule found."""
        rng = random.Random(self._seed)
        best = max(
            (self.run("clairvoyant", schedule), schedule)
            for schedule in (self._follow_phases(share, lead) for share in (5, 6) for lead in (0, 1, 2))
        )
        for _ in range(tries):
            schedule = self._change(best[1], rng)
            found = self.run("clairvoyant", schedule)
            if found >= best[0]:
                best = found, schedule
        return best[0]

    def _follow_phases(self, prefill: int, lead_s: int) -> Schedule:
        """So many prefill instances in phases of prompts, from `lead_s` before them on; else the fewest."""
        most = min(prefill, self._high)
        return [most if (at + lead_s) // PHASE_S % 2 == 0 else self._low for at in range(self._steps)]

    def _change(self, schedule: Sequence[int], rng: random.Random) -> Schedule:
        changed = list(schedule)
        for _ in range(rng.choice((1, 1, 2))):
            start, length = rng.randrange(self._steps), rng.choice(LENGTHS)
            by = rng.choice((-2, -1, -1, 1, 1, 2))
            for at in range(start, min(self._steps, start + length)):
                changed[at] = min(self._high, max(self._low, changed[at] + by))
        return changed


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="1,2,3,4,5")
    parser.add_argument("--for", dest="seconds", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--tries", type=int, default=150)
    given = parser.parse_args()
    (service,) = (obj for obj in read_manifest(find_shipped_manifest("play")) if isinstance(obj, PDService))
    rows: list[list[float]] = []
    for seed in map(int, given.seeds.split(",")):
        rows.append(Bound(service, seed, given.seconds).compare(given.tries))
        print(f"seed {seed}: {_format(rows[-1])}", flush=True)
    print(f"mean:   {_format([fmean(column) for column in zip(*rows, strict=True)])}")
    print(f"worst:  {_format([min(column) for column in zip(*rows, strict=True)])}")


def _format(row: Sequence[float]) -> str:
    return ", ".join(f"{name} {share:.1%}" for name, share in zip(COLUMNS, row, strict=True))


if __name__ == "__main__":
    main()
