"""Times the choice of a prefill and of a decode instance, by the number of instances and of identity groups.

Every instance has work in flight and every pair a record, half of them cold.

    python bench/dispatch.py [--rounds N] [--compiled]

Exit code 1 if a choice takes longer than the bar: 50 µs with 64 instances, 120 µs with 200. With `--compiled`
the router is compiled first, as in the image.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable

from bench.compiled import ensure_compiled
from fulcrum_core.latency import DecodeModel, PrefillModel
from fulcrum_core.values import EngineIdentity, Role, Slo
from fulcrum_router.fleet.instances import Fleet, Instance
from fulcrum_router.policy import Dispatch, PairKey, TransferPairs, Work, choose_decode, choose_prefill
from tools.compiled.build import describe_router

BARS_S = {64: 50e-6, 200: 120e-6}
GROUPS = (1, 2, 8)
SLO = Slo(ttft_s=5.0, tpot_s=0.05)
NOW_S = 100.0


def make_fleet(count: int, groups: int, rng: random.Random) -> tuple[Fleet, TransferPairs]:
    """Make a busy fleet, half of it prefill instances, with a record of every pair."""
    identities = [EngineIdentity(f"m{i}", "v 1", "bf16", 16, 1) for i in range(groups)]
    fleet, pairs = Fleet(), TransferPairs()
    for i in range(count):
        instance = Instance(
            f"chat-{i:03}", prefill=PrefillModel(0.01, 1e-4, 1e-9), decode=DecodeModel(0.01, 1e-7)
        )
        instance.role = Role.DECODE if i % 2 else Role.PREFILL
        instance.identity, instance.serving = identities[i // 2 % groups], True
        fleet.add(instance)
        if i % 2:
            instance.ledger.add_decode(tokens=rng.randrange(1, 50_000))
        else:
            for _ in range(3):
                instance.ledger.add_prefill(tokens=500, predicted_s=rng.uniform(0.01, 0.3), now_s=NOW_S)
    prefills, decodes = fleet.instances[::2], fleet.instances[1::2]
    for prefill in prefills:
        for decode in decodes:
            if rng.random() < 0.5:
                pairs[PairKey(prefill.name, decode.name)].warm_until_s = NOW_S + 1
    pairs.refresh(fleet.instances, now_s=NOW_S)
    return fleet, pairs


def time_best(call: Callable[[], object], rounds: int) -> float:
    """CPU seconds of one call: the mean of the fastest of nine series. Other programs do not count."""
    series = []
    for _ in range(9):
        started_s = time.thread_time()
        for _ in range(rounds):
            call()
        series.append((time.thread_time() - started_s) / rounds)
    return min(series)


def main() -> int:
    """Print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--compiled", action="store_true", help="compile the router first")
    given = parser.parse_args()
    if given.compiled:
        ensure_compiled(describe_router)
    rounds = given.rounds
    work, failed = Work(1_000, SLO, deadline_s=NOW_S + SLO.ttft_s), False
    late = Work(1_000, SLO, deadline_s=NOW_S)
    print("instances  groups  prefill µs  prefill, none within SLO µs  decode µs")
    for count, bar_s in BARS_S.items():
        for groups in GROUPS:
            fleet, pairs = make_fleet(count, groups, random.Random(1))
            source = fleet.instances[0]

            def prefill(work: Work = work, fleet: Fleet = fleet, pairs: TransferPairs = pairs) -> object:
                return choose_prefill(fleet.candidates, work, now_s=NOW_S, delays=pairs.prefill_delays)

            def decode(
                fleet: Fleet = fleet, pairs: TransferPairs = pairs, source: Instance = source
            ) -> object:
                known = pairs.list_from(source.name)
                return choose_decode(fleet.candidates, work, now_s=NOW_S, prefilled_on=source, pairs=known)

            assert isinstance(prefill(), Dispatch)
            assert isinstance(decode(), Dispatch)
            taken = [time_best(call, rounds) for call in (prefill, lambda: prefill(late), decode)]
            failed = failed or max(taken) > bar_s
            figures = "  ".join(f"{seconds * 1e6:10.1f}" for seconds in taken)
            print(f"{count:9}  {groups:6}  {figures}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
