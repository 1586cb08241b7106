"""Fairness in the waiting room: tenants, weights of tiers, and the longest wait of a tier.

    python bench/fairness.py tenants [--trace FILE] [--speed 160] [--for 240] [--live]
    python bench/fairness.py weights [--for 240] [--live]
    python bench/fairness.py ageing [--for 150] [--live]
    python bench/fairness.py reserve [--for 120] [--live]

Simulated, or with `--live` in real time on a local service, whose engines are engine servers (`live_fleet`).
`tenants`: a trace with tenants, repeated, or an adversarial pair: one tenant with long prompts and
one with long answers; both at more than the fleet can serve. Service is weighted tokens: 1 for a prompt token
when the prompt is sent, 2 for an output token when it appears. While two tenants wait, their services differ
by at most the bound of the VTC paper, 2 max(longest prompt, 2 M), where M is the tokens that the KV caches of
decode hold. In windows of 60 s, none that waits gets more than 5 % less than its max-min fair share: who asks
for less than an equal share of what was served leaves the rest to the others. `weights`: the shares of two
tiers of one priority that wait, with weights 3 and 1. `ageing`: the higher two of three tiers send more than
the fleet can serve without end: the longest wait of a request of the lowest one, against its bound.
`reserve`: the highest of two tiers reserves half of two prefill and two decode instances, and sends nothing
for the time that is given, while the other one sends more than the fleet can serve: tokens served in that
time, with and without the reserve. Then it sends a prompt, and another one each time the reserve has been
lent again: the longest time until one is computed, against one prompt of the other tier, and until the other
tier has left the reserve of the KV caches, against `reclaimWithin`. Exit code 1 if a bar is missed.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from statistics import median

from bench.live_fleet import LiveRuns, Run, run_simulated
from fulcrum_core.profiles import load_profile
from fulcrum_core.values import Slo
from fulcrum_router.policy.tiers.decode_share import SENDS_FOR_S
from fulcrum_router.policy.tiers.tier_reserve import SPARE_S, Reserve
from fulcrum_router.policy.tiers.token_counters import INPUT_WEIGHT, OUTPUT_WEIGHT
from fulcrum_router.policy.waiting.level import AGEING_FACTOR
from fulcrum_simulator.fleet.load import leave_out_overlong
from fulcrum_simulator.fleet.options import RunOptions, parse_policy
from fulcrum_simulator.fleet.records import RequestResult
from fulcrum_simulator.workload import WorkloadRequest, load_trace

PREFILL = 1
"""Prefill instances: they are what binds, since the room orders prefill."""
TRACE_DECODE = 7
"""Decode instances for a trace, whose answers are longer than its prompts."""
LASTS_S = {"tenants": 240.0, "weights": 240.0, "ageing": 150.0, "reserve": 120.0}
PROFILE = load_profile("l70-h100-tp4")
SLO = Slo(ttft_s=3.0, tpot_s=0.1)
WINDOW_S = 60.0
RESERVED, RESERVE_DECODE = 0.5, 2
"""Reserve of the highest tier, and decode instances of the fleet that has it."""
RECLAIM_S, RETURNS, RETURNS_EACH_S = 10.0, 5, SENDS_FOR_S + 5.17
"""Between two returns the tier is idle for so long that it lends its reserve, and restrains nobody more."""
RESERVE_LOSS_MAX = 0.02
SMALL_KV_TOKENS = 60_000
"""KV cache of a decode instance: few enough that answers fill it."""
SHORTFALL_MAX = 0.05
PREFILL_AHEAD_S = 0.5


def main() -> int:
    """Run one measurement; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("measurement", choices=LASTS_S)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--speed", type=float, default=160.0, help="of the trace (%(default)s)")
    parser.add_argument("--for", dest="lasts_s", type=float, metavar="SECONDS")
    parser.add_argument("--live", action="store_true", help="in real time, with engine servers")
    given = parser.parse_args()
    live, lasts_s = LiveRuns(), given.lasts_s or LASTS_S[given.measurement]
    run = live.run if given.live else run_simulated
    if given.measurement == "weights":
        missed = measure_weights(run, lasts_s)
    elif given.measurement == "ageing":
        missed = measure_ageing(run, lasts_s)
    elif given.measurement == "reserve":
        missed = measure_reserve(run, lasts_s)
    elif given.trace is None:
        options = make_options(kv_tokens=SMALL_KV_TOKENS)
        missed = measure_tenants(run, make_pair(lasts_s), options)
    else:
        options = make_options(decode=TRACE_DECODE)
        missed = measure_tenants(run, read_trace(given.trace, given.speed, lasts_s), options)
    return missed or int(not live.all_valid)


def make_options(
    *, decode: int = 1, weights: Mapping[str, int] | None = None, kv_tokens: int | None = None
) -> RunOptions:
    """Options of a run in mode Queue with a fixed split, until the last arrival.

    `kv_tokens`: KV cache of an instance, in place of that of the profile.
    """
    instances = PREFILL + decode
    return RunOptions(
        profile=PROFILE.model_copy(update={"kv_capacity_tokens": kv_tokens} if kv_tokens else {}),
        instances=instances,
        policy=parse_policy(f"static:{PREFILL}P{decode}D", instances=instances),
        slo=SLO,
        drain_s=0.0,
        weights=weights or {},
    )


# --- tenants -----------------------------------------------------------------------------------------


def read_trace(trace: Path, speed: float, lasts_s: float) -> list[WorkloadRequest]:
    """Read a trace with tenants, faster, and repeat it for `lasts_s`."""
    requests, _ = leave_out_overlong(load_trace(trace).requests, PROFILE)
    length_s = requests[-1].arrival_s / speed
    return [
        replace(request, arrival_s=round_number * length_s + request.arrival_s / speed)
        for round_number in range(int(lasts_s / length_s))
        for request in requests
    ]


def make_pair(lasts_s: float) -> list[WorkloadRequest]:
    """Two tenants that send more than the fleet can serve: long prompts, and long answers."""
    prompts = [WorkloadRequest(n * 0.2, 8_000, 16, tenant="prompts") for n in range(int(lasts_s * 5))]
    answers = [WorkloadRequest(n * 0.02, 200, 400, tenant="answers") for n in range(int(lasts_s * 50))]
    return sorted([*prompts, *answers], key=lambda request: request.arrival_s)


def measure_tenants(run: Run, workload: Sequence[WorkloadRequest], options: RunOptions) -> int:
    """Print the largest difference of service, and the largest shortfall of a tenant that waits."""
    records = run(workload, options)
    end_s = int(workload[-1].arrival_s)
    tenants = sorted({record.request.tenant or "" for record in records})
    served = {
        tenant: count_service([r for r in records if r.request.tenant == tenant], end_s) for tenant in tenants
    }
    waits = {
        tenant: find_waits([r for r in records if r.request.tenant == tenant], end_s) for tenant in tenants
    }
    kv_tokens = options.policy.decode * options.profile.kv_capacity_tokens
    longest = max(request.input_tokens for request in workload)
    bound = 2 * max(INPUT_WEIGHT * longest, OUTPUT_WEIGHT * kv_tokens)
    most = max(
        (find_difference(served[a], served[b], waits[a], waits[b]) for a, b in combinations(tenants, 2)),
        default=0.0,
    )
    shortfalls = find_shortfalls(served, waits, end_s)
    worst = max(shortfalls, default=0.0)
    print(
        f"{len(tenants)} tenants, {end_s} s; {len(shortfalls)} times a tenant waited for a window of "
        f"{WINDOW_S:g} s"
    )
    print(f"largest difference of service between two that wait: {most:,.0f} tokens (bound: {bound:,.0f})")
    print(f"largest shortfall from the fair share: {worst:.1%} (bar: {SHORTFALL_MAX:.0%})")
    return int(most > bound or worst > SHORTFALL_MAX or not shortfalls)


def count_service(records: Sequence[RequestResult], end_s: int) -> list[float]:
    """Weighted tokens that were served until each second.

    Of an answer that had no end, the tokens are taken to have come as fast as those of others.
    """
    changes, gap_s = [0.0] * (end_s + 2), median([r.tpot_s for r in records if r.tpot_s] or [0.0])
    for record in records:
        sent_s = find_sent(record)
        if sent_s is None or sent_s > end_s:
            continue
        changes[int(sent_s) + 1] += INPUT_WEIGHT * record.request.input_tokens
        if record.first_token_s is None or record.first_token_s > end_s:
            continue
        first = int(record.first_token_s)
        last = int(record.last_token_s or record.first_token_s + gap_s * record.request.output_tokens)
        tokens = record.request.output_tokens if record.last_token_s is None else record.output_tokens
        for second in range(first, min(last, end_s) + 1):
            changes[second + 1] += OUTPUT_WEIGHT * tokens / (last - first + 1)
    total, sums = 0.0, []
    for change in changes[: end_s + 1]:
        total += change
        sums.append(total)
    return sums


def find_sent(record: RequestResult) -> float | None:
    """When the prompt was sent; of one that decode computes, the time of its first token."""
    return record.prefill_sent_s or record.first_token_s


def find_waits(records: Sequence[RequestResult], end_s: int) -> list[bool]:
    """Whether a request of a tenant waited in the whole of each second."""
    changes = [0] * (end_s + 2)
    for record in records:
        sent_s = find_sent(record)
        first = int(record.request.arrival_s) + 1
        last = end_s if sent_s is None else min(int(sent_s), end_s)
        if last > first:
            changes[first] += 1
            changes[last] -= 1
    waiting, found = 0, []
    for change in changes[: end_s + 1]:
        waiting += change
        found.append(waiting > 0)
    return found


def find_difference(
    first: Sequence[float], second: Sequence[float], waits: Sequence[bool], other: Sequence[bool]
) -> float:
    """The most by which the difference of two services changes while both wait without a break."""
    most = low = high = 0.0
    is_open = False
    for a, b, both in zip(first, second, map(all, zip(waits, other, strict=True)), strict=True):
        difference = a - b
        low, high = (
            (min(low, difference), max(high, difference)) if is_open and both else (difference, difference)
        )
        is_open, most = both, max(most, high - low)
    return most


def find_shortfalls(
    served: Mapping[str, Sequence[float]], waits: Mapping[str, Sequence[bool]], end_s: int
) -> list[float]:
    """By how much of its share each tenant gets less in the windows in which it waits all the time."""
    step, shortfalls = int(WINDOW_S), []
    for start, end in pairwise(range(0, end_s + 1, step)):
        got = {tenant: sums[end] - sums[start] for tenant, sums in served.items()}
        active = [tenant for tenant in served if got[tenant] > 0 or any(waits[tenant][start:end])]
        waiting = [tenant for tenant in active if all(waits[tenant][start:end])]
        others = [got[tenant] for tenant in active if tenant not in waiting]
        share = find_share(others, sum(got.values()), len(waiting))
        shortfalls += [1.0 - got[tenant] / share for tenant in waiting]
    return shortfalls


def find_share(others: Sequence[float], total: float, waiting: int) -> float:
    """The max-min fair share of each tenant that waits, where the others got all that they asked for."""
    count = waiting + len(others)
    for got in sorted(others):
        if got >= total / count:
            break
        total, count = total - got, count - 1
    return total / max(1, count)


# --- tiers -------------------------------------------------------------------------------------------


def measure_weights(run: Run, lasts_s: float) -> int:
    """Print the shares of two tiers with weights 3 and 1; the second one has four tenants."""
    workload = [
        WorkloadRequest(n * 0.1, 4_000, 50, tenant=tenant, tier=tier)
        for n in range(int(lasts_s * 10))
        for tier, tenant in (("heavy", "a"), ("light", f"b{n % 4}"))
    ]
    records = run(workload, make_options(weights={"heavy": 3}))
    end_s = int(workload[-1].arrival_s)
    heavy, light = (
        count_service([r for r in records if r.request.tier == tier], end_s)[-1]
        for tier in ("heavy", "light")
    )
    print(
        f"weights 3 and 1: services {heavy:,.0f} and {light:,.0f} tokens, {heavy / light:.2f} : 1 "
        "(bar: 2.85 to 3.15)"
    )
    return int(not 2.85 <= heavy / light <= 3.15)


def measure_ageing(run: Run, lasts_s: float) -> int:
    """Print the longest wait of the lowest of three tiers under endless load of the others."""
    tokens, every_s = 4_000, 8.0
    own_s = PROFILE.step_model.prefill_model(PROFILE.token_budget).ttft_s(tokens)
    flood = [
        WorkloadRequest(n * own_s / 4, tokens, 10, tenant=tier, tier=tier, priority=priority)
        for n in range(int(4 * lasts_s / own_s))
        for tier, priority in (("premium", 10), ("standard", 0))
    ]
    last_s = flood[-1].arrival_s
    lowest = [
        WorkloadRequest(n * every_s, tokens, 10, tenant="free", tier="free", priority=-10)
        for n in range(1, int(last_s / every_s))
    ]
    records = run(sorted([*flood, *lowest], key=lambda request: request.arrival_s), make_options())
    waits = [(find_sent(r) or last_s) - r.request.arrival_s for r in records if r.request.tier == "free"]
    # Its own work times the factor, a request of each other level, and what the instance has already.
    bound_s = ((AGEING_FACTOR + 2) * own_s) / PREFILL + PREFILL_AHEAD_S + own_s
    print(
        f"{len(waits)} requests of the lowest tier: longest wait {max(waits):.2f} s (bound: {bound_s:.2f} s)"
    )
    return int(max(waits) > bound_s)


def measure_reserve(run: Run, idle_s: float) -> int:
    """Print what an idle reserve costs, and how soon it is back, in prefill and in decode."""
    prompt_s = PROFILE.step_model.prefill_model(PROFILE.token_budget).ttft_s(8_000)
    missed = 0
    for name, lengths in (("prompts", ((8_000, 10),)), ("answers", ((1_500, 100), (3_000, 800)))):
        flood = make_flood(lengths, every_s=prompt_s / 6, end_s=idle_s + RETURNS * RETURNS_EACH_S)
        load = sorted([*flood, *make_returns(idle_s)], key=lambda request: request.arrival_s)
        # Answers that run at `idle_s` have to end, to be counted.
        cut = [request for request in load if request.arrival_s < idle_s + RETURNS_EACH_S]
        plain = select(run(cut, make_reserve_options(Reserve())), "free")
        records = run(load, make_reserve_options(Reserve(RESERVED, RECLAIM_S)))
        free, owner = select(records, "free"), select(records, "premium")
        loss = 1 - count_service(free, int(idle_s))[-1] / count_service(plain, int(idle_s))[-1]
        left = (1.0 - RESERVED) * RESERVE_DECODE * SMALL_KV_TOKENS
        backs_s = [find_return(free, left, one.request.arrival_s) for one in owner]
        waits_s = [find_wait_s(record) for record in owner]
        print(
            f"flood of {name}: an idle reserve of {RESERVED:g} costs {loss:.1%} of the tokens served (bar: "
            f"2 %); it is back in prefill after {format_times(waits_s)} s (bar: a prompt and {SPARE_S:g} s, "
            f"{prompt_s + SPARE_S:.2f} s) and in decode after {format_times(backs_s)} s (bar: reclaimWithin, "
            f"{RECLAIM_S:g} s)",
            flush=True,
        )
        is_late = max(waits_s) > prompt_s + SPARE_S or max(backs_s) > RECLAIM_S
        missed += loss > RESERVE_LOSS_MAX or is_late
    return int(missed > 0)


def select(records: Sequence[RequestResult], tier: str) -> list[RequestResult]:
    """The requests of one tier."""
    return [record for record in records if record.request.tier == tier]


def format_times(times_s: Sequence[float]) -> str:
    """The median and the longest time."""
    return f"{median(times_s):.2f} (longest {max(times_s):.2f})"


def make_reserve_options(reserve: Reserve) -> RunOptions:
    """Options of a run with two prefill and two decode instances and this reserve of the highest tier."""
    return RunOptions(
        profile=PROFILE.model_copy(update={"kv_capacity_tokens": SMALL_KV_TOKENS}),
        instances=2 + RESERVE_DECODE,
        policy=parse_policy(f"static:2P{RESERVE_DECODE}D", instances=2 + RESERVE_DECODE),
        slo=SLO,
        drain_s=0.0,
        reserved={"premium": reserve},
    )


def make_flood(lengths: Sequence[tuple[int, int]], *, every_s: float, end_s: float) -> list[WorkloadRequest]:
    """A flood of one tier with these lengths in turn."""
    return [
        WorkloadRequest(n * every_s, *lengths[n % len(lengths)], tenant="free", tier="free")
        for n in range(int(end_s / every_s))
    ]


def make_returns(idle_s: float) -> list[WorkloadRequest]:
    """The prompts of the highest tier, each after its reserve was lent."""
    return [
        WorkloadRequest(idle_s + n * RETURNS_EACH_S, 2_000, 100, tenant="acme", tier="premium", priority=10)
        for n in range(RETURNS)
    ]


def find_wait_s(record: RequestResult) -> float:
    """How long a prompt waited until it was computed; infinite: it was not."""
    sent_s = find_sent(record)
    return math.inf if sent_s is None else sent_s - record.request.arrival_s + record.prefill_queue_s


def find_return(records: Sequence[RequestResult], tokens: float, from_s: float) -> float:
    """After how many seconds the requests have no more tokens than this in decode; infinite: not in time."""
    gap_s = median(record.tpot_s for record in records if record.tpot_s)
    for tenth in range(int(10 * 1.5 * RECLAIM_S)):
        if sum(count_held(record, from_s + tenth / 10, gap_s) for record in records) <= tokens:
            return tenth / 10
    return math.inf


def count_held(record: RequestResult, at_s: float, gap_s: float) -> float:
    """KV tokens of a request in decode; `gap_s` is the time of a token of one that has not ended."""
    first_s = record.first_token_s
    if first_s is None or not first_s <= at_s < (record.last_token_s or math.inf):
        return 0.0
    return record.request.input_tokens + (at_s - first_s) / (record.tpot_s or gap_s)


if __name__ == "__main__":
    sys.exit(main())
