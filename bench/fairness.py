"""Fairness in the waiting room, by simulation: tenants, weights of tiers, and the longest wait of a tier.

    python bench/fairness.py tenants [--trace FILE] [--speed 160]
    python bench/fairness.py weights
    python bench/fairness.py ageing
    python bench/fairness.py reserve

`tenants`: a trace with tenants, repeated for 4 min, or an adversarial pair: one tenant with long prompts and
one with long answers; both at more than the fleet can serve. Service is weighted tokens: 1 for a prompt token
when the prompt is sent, 2 for an output token when it appears. While two tenants wait, their services differ
by at most the bound of the VTC paper, 2 max(longest prompt, 2 M), where M is the tokens that the KV caches of
decode hold. In windows of 60 s, none that waits gets more than 5 % less than its max-min fair share: who asks
for less than an equal share of what was served leaves the rest to the others. `weights`: the shares of two
tiers of one priority that wait, with weights 3 and 1. `ageing`: the higher two of three tiers send more than
the fleet can serve without end: the longest wait of a request of the lowest one, against its bound.
`reserve`: the highest of two tiers reserves half of two prefill and two decode instances, and sends nothing
for 2 min, while the other one sends more than the fleet can serve: tokens served in that time, with and
without the reserve. Then it sends a prompt: the time until it is sent on, against one prompt of the other
tier, and until the other one has left the reserve of the KV caches, against `reclaimWithin`. Exit code 1 if
a bar is missed.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from statistics import median

from fulcrum_core.profiles import load_profile
from fulcrum_core.values import Slo
from fulcrum_router.policy.tiers.tier_reserve import Reserve
from fulcrum_router.policy.tiers.token_counters import INPUT_WEIGHT, OUTPUT_WEIGHT
from fulcrum_router.policy.waiting.level import AGEING_FACTOR
from fulcrum_simulator.fleet.load import leave_out_overlong
from fulcrum_simulator.fleet.options import RunOptions, parse_policy
from fulcrum_simulator.fleet.records import RequestResult
from fulcrum_simulator.fleet.run import simulate
from fulcrum_simulator.workload import WorkloadRequest, load_trace

PREFILL = 1
"""Prefill instances: they are what binds, since the room orders prefill."""
TRACE_DECODE = 7
"""Decode instances for a trace, whose answers are longer than its prompts."""
REPEATED_S = 240.0
PROFILE = load_profile("l70-h100-tp4")
SLO = Slo(ttft_s=3.0, tpot_s=0.1)
WINDOW_S = 60.0
IDLE_FOR_S, RESERVE_S, RECLAIM_S = 120.0, 160.0, 10.0
RESERVE_LOSS_MAX = 0.02
RESERVE_KV_TOKENS = 60_000
"""KV cache of a decode instance: few enough that answers fill it."""
SHORTFALL_MAX = 0.05
PREFILL_AHEAD_S = 0.5


def main() -> int:
    """Run one measurement; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("measurement", choices=("tenants", "weights", "ageing", "reserve"))
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--speed", type=float, default=160.0, help="of the trace (%(default)s)")
    given = parser.parse_args()
    if given.measurement == "weights":
        return measure_weights()
    if given.measurement == "ageing":
        return measure_ageing()
    if given.measurement == "reserve":
        return measure_reserve()
    if given.trace is None:
        return measure_tenants(make_pair(), decode=1)
    return measure_tenants(read_trace(given.trace, given.speed), decode=TRACE_DECODE)


def run(
    workload: Sequence[WorkloadRequest], *, decode: int = 1, weights: Mapping[str, int] | None = None
) -> list[RequestResult]:
    """Run a workload in mode Queue with a fixed split, until its last arrival."""
    instances = PREFILL + decode
    options = RunOptions(
        profile=PROFILE,
        instances=instances,
        policy=parse_policy(f"static:{PREFILL}P{decode}D", instances=instances),
        slo=SLO,
        drain_s=0.0,
        weights=weights or {},
    )
    return list(simulate(workload, options).records)


# --- tenants -----------------------------------------------------------------------------------------


def read_trace(trace: Path, speed: float) -> list[WorkloadRequest]:
    """Read a trace with tenants, faster, and repeat it for 4 min."""
    requests, _ = leave_out_overlong(load_trace(trace).requests, PROFILE)
    length_s = requests[-1].arrival_s / speed
    return [
        replace(request, arrival_s=round_number * length_s + request.arrival_s / speed)
        for round_number in range(int(REPEATED_S / length_s))
        for request in requests
    ]


def make_pair() -> list[WorkloadRequest]:
    """Two tenants that send more than the fleet can serve for 4 min: long prompts, and long answers."""
    prompts = [WorkloadRequest(n * 0.2, 8_000, 16, tenant="prompts") for n in range(1_200)]
    answers = [WorkloadRequest(n * 0.02, 200, 400, tenant="answers") for n in range(12_000)]
    return sorted([*prompts, *answers], key=lambda request: request.arrival_s)


def measure_tenants(workload: Sequence[WorkloadRequest], *, decode: int) -> int:
    """Print the largest difference of service, and the largest shortfall of a tenant that waits."""
    records = run(workload, decode=decode)
    end_s = int(workload[-1].arrival_s)
    tenants = sorted({record.request.tenant or "" for record in records})
    served = {
        tenant: count_service([r for r in records if r.request.tenant == tenant], end_s) for tenant in tenants
    }
    waits = {
        tenant: find_waits([r for r in records if r.request.tenant == tenant], end_s) for tenant in tenants
    }
    kv_tokens = decode * (PROFILE.kv_capacity_tokens or 0)
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
    """Weighted tokens that were served until each second."""
    changes = [0.0] * (end_s + 2)
    for record in records:
        sent_s = find_sent(record)
        if sent_s is None or sent_s > end_s:
            continue
        changes[int(sent_s) + 1] += INPUT_WEIGHT * record.request.input_tokens
        if record.first_token_s is None or record.first_token_s > end_s:
            continue
        first, last = int(record.first_token_s), int(record.last_token_s or end_s)
        for second in range(first, min(last, end_s) + 1):
            changes[second + 1] += OUTPUT_WEIGHT * record.output_tokens / (last - first + 1)
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


def measure_weights() -> int:
    """Print the shares of two tiers with weights 3 and 1; the second one has four tenants."""
    workload = [
        WorkloadRequest(n * 0.1, 4_000, 50, tenant=tenant, tier=tier)
        for n in range(2_400)
        for tier, tenant in (("heavy", "a"), ("light", f"b{n % 4}"))
    ]
    records = run(workload, weights={"heavy": 3})
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


def measure_ageing() -> int:
    """Print the longest wait of the lowest of three tiers under endless load of the others."""
    tokens, every_s = 4_000, 8.0
    own_s = PROFILE.step_model.prefill_model(PROFILE.token_budget).ttft_s(tokens)
    flood = [
        WorkloadRequest(n * own_s / 4, tokens, 10, tenant=tier, tier=tier, priority=priority)
        for n in range(int(600 / own_s))
        for tier, priority in (("premium", 10), ("standard", 0))
    ]
    last_s = flood[-1].arrival_s
    lowest = [
        WorkloadRequest(n * every_s, tokens, 10, tenant="free", tier="free", priority=-10)
        for n in range(1, int(last_s / every_s))
    ]
    records = run(sorted([*flood, *lowest], key=lambda request: request.arrival_s))
    waits = [(find_sent(r) or last_s) - r.request.arrival_s for r in records if r.request.tier == "free"]
    # Its own work times the factor, a request of each other level, and what the instance has already.
    bound_s = ((AGEING_FACTOR + 2) * own_s) / PREFILL + PREFILL_AHEAD_S + own_s
    print(
        f"{len(waits)} requests of the lowest tier: longest wait {max(waits):.2f} s (bound: {bound_s:.2f} s)"
    )
    return int(max(waits) > bound_s)


def measure_reserve() -> int:
    """Print what an idle reserve costs, and how soon it is back, in prefill and in decode."""
    profile = PROFILE.model_copy(update={"kv_capacity_tokens": RESERVE_KV_TOKENS})
    prompt_s = profile.step_model.prefill_model(profile.token_budget).ttft_s(8_000)
    missed = 0
    for name, lengths in (("prompts", ((8_000, 10),)), ("answers", ((1_500, 100), (3_000, 800)))):
        workload = make_reserve_load(lengths, every_s=prompt_s / 6)
        served, back_s, wait_s = [], 0.0, 0.0
        for reserve in (Reserve(), Reserve(0.5, RECLAIM_S)):
            options = RunOptions(
                profile=profile,
                instances=4,
                policy=parse_policy("static:2P2D", instances=4),
                slo=SLO,
                drain_s=0.0,
                reserved={"premium": reserve},
            )
            records = simulate(workload, options).records
            free = [record for record in records if record.request.tier == "free"]
            served.append(count_service(free, int(IDLE_FOR_S))[-1])
            back_s = find_return(free, 2 * RESERVE_KV_TOKENS * (1 - reserve.fraction)) - IDLE_FOR_S
            first = next(record for record in records if record.request.tier == "premium")
            wait_s = first.prefill_sent_s - first.request.arrival_s + first.prefill_queue_s
        loss = 1 - served[1] / served[0]
        print(
            f"flood of {name}: an idle reserve of 0.5 costs {loss:.1%} of the tokens served (bar: 2 %); it "
            f"is back in prefill after {wait_s:.2f} s (bar: a prompt, {prompt_s:.2f} s) and in decode after "
            f"{back_s:.1f} s (bar: reclaimWithin, {RECLAIM_S:g} s)",
            flush=True,
        )
        missed += loss > RESERVE_LOSS_MAX or wait_s > prompt_s or back_s > RECLAIM_S
    return int(missed > 0)


def make_reserve_load(lengths: Sequence[tuple[int, int]], *, every_s: float) -> list[WorkloadRequest]:
    """A flood of one tier with these lengths in turn, and after 2 min a request a second of the other one."""
    flood = [
        WorkloadRequest(n * every_s, *lengths[n % len(lengths)], tenant="free", tier="free")
        for n in range(int(RESERVE_S / every_s))
    ]
    owner = [
        WorkloadRequest(IDLE_FOR_S + n, 2_000, 100, tenant="acme", tier="premium", priority=10)
        for n in range(int(RESERVE_S - IDLE_FOR_S))
    ]
    return sorted([*flood, *owner], key=lambda request: request.arrival_s)


def find_return(records: Sequence[RequestResult], tokens: float) -> float:
    """When, in seconds, the requests have no more tokens than this in decode, once the reserve is used."""
    gap_s = median(record.tpot_s for record in records if record.tpot_s)
    for tenth in range(int(10 * IDLE_FOR_S), int(10 * RESERVE_S)):
        at_s = tenth / 10
        if sum(count_held(record, at_s, gap_s) for record in records) <= tokens:
            return at_s
    return math.inf


def count_held(record: RequestResult, at_s: float, gap_s: float) -> float:
    """KV tokens of a request in decode; `gap_s` is the time of a token of one that has not ended."""
    first_s = record.first_token_s
    if first_s is None or not first_s <= at_s < (record.last_token_s or math.inf):
        return 0.0
    return record.request.input_tokens + (at_s - first_s) / (record.tpot_s or gap_s)


if __name__ == "__main__":
    sys.exit(main())
