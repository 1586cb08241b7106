"""The figures of a simulated run: SLO attainment, goodput, flips, and where time went.

Attainment counts offered requests: a failed, broken or unfinished one is a miss. Requests of the first tenth
of the run are served but not scored. `policy_runs` builds one for each run; `fulcrum simulate` prints it.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from fulcrum_simulator.fleet.records import RequestResult
from fulcrum_simulator.fleet.run import RunResult
from fulcrum_simulator.percentile import percentile
from fulcrum_simulator.routing import Outcome


def build_report(result: RunResult) -> dict[str, Any]:
    """Return the figures of a run as JSON values. Times are seconds, shares are between 0 and 1."""
    options, scored = result.options, result.scored
    met = [record for record in scored if record.meets(options.slo)]
    return {
        "policy": str(options.policy),
        "instances": options.instances,
        "profile": options.profile.name,
        "seed": options.seed,
        "control": asdict(options.control),
        "prefix_caches": options.prefix_caches,
        "slo": {"ttft_s": options.slo.ttft_s, "tpot_s": options.slo.tpot_s},
        "requests": _count_requests(result.records, scored),
        "attainment": _share(len(met), len(scored)),
        "tiers": _judge_tiers(result, scored),
        "attainment_by_arrow": _share(sum(r.meets_by_arrow(options.slo) for r in scored), len(scored)),
        "goodput": _measure_goodput(result, scored, met),
        "ttft_s": _summarize(r.ttft_s for r in scored),
        "tpot_s": _summarize(r.tpot_s for r in scored),
        "ttft_by_arrow_s": _summarize(r.arrow_ttft_s for r in scored),
        "tpot_by_arrow_s": _summarize(r.arrow_tpot_s for r in scored),
        "flips": _describe_flips(result),
        "request_time_s": _split_request_time(scored),
        "request_time_without_prefill_leg_s": _split_time_without_prefill_leg(scored),
        "instance_time": _split_instance_time(result),
        "engine_failures": result.engine_failures,
        "failed_transfers": result.failed_transfers,
        "preemptions": result.preemptions,
        "end_s": result.end_s,
        "events": result.events,
    }


def _count_requests(records: Sequence[RequestResult], scored: Sequence[RequestResult]) -> dict[str, int]:
    outcomes = Counter(record.outcome for record in scored)
    return {
        "offered": len(records),
        "scored": len(scored),
        **{outcome.value: outcomes[outcome] for outcome in Outcome},
        "unfinished": outcomes[None],
        "without_prefill_leg": sum(r.outcome is Outcome.OK and r.prefill_end_s is None for r in scored),
    }


def _judge_tiers(result: RunResult, scored: Sequence[RequestResult]) -> dict[str, dict[str, Any]]:
    """The attainment of each tier that the workload names, and how many of its requests were refused."""
    by_tier: dict[str, list[RequestResult]] = {}
    for record in scored:
        by_tier.setdefault(record.request.tier, []).append(record)
    return {
        tier: {
            "scored": len(records),
            "failed": sum(record.outcome is Outcome.FAILED for record in records),
            "refused": sum(record.outcome is Outcome.REFUSED for record in records),
            "attainment": _share(sum(r.meets(result.options.slo) for r in records), len(records)),
        }
        for tier, records in sorted(by_tier.items())
        if tier
    }


def _measure_goodput(
    result: RunResult, scored: Sequence[RequestResult], met: Sequence[RequestResult]
) -> dict[str, float | None]:
    """Measure what was served within the SLO: requests and output tokens per second, share of all tokens."""
    duration_s = result.last_arrival_s - result.first_scored_s
    output = sum(record.output_tokens for record in met)
    return {
        "requests_per_s": _share(len(met), duration_s),
        "output_tokens_per_s": _share(output, duration_s),
        "token_share": _share(
            sum(r.request.input_tokens + r.output_tokens for r in met),
            sum(r.request.input_tokens + r.request.output_tokens for r in scored),
        ),
        "offered_requests_per_s": _share(len(scored), duration_s),
    }


def _describe_flips(result: RunResult) -> dict[str, Any]:
    return {
        "count": len(result.flips),
        "to_prefill": sum(flip.to == "Prefill" for flip in result.flips),
        "to_decode": sum(flip.to == "Decode" for flip in result.flips),
        "refused": result.refused_flips,
        "requests": result.flip_requests,
        "log": [
            {"at_s": f.at_s, "instance": f.instance, "to": f.to, "from_split": f.split, "reason": f.reason}
            for f in result.flips
        ],
    }


def _split_request_time(scored: Sequence[RequestResult]) -> dict[str, float | None]:
    """Split the mean time of a successful request with a prefill leg into its stages."""
    stages: list[tuple[float, float, float, float, float]] = []
    for r in scored:
        if r.outcome is Outcome.OK and r.prefill_end_s and r.first_token_s and r.last_token_s:
            dispatched_s = r.prefill_sent_s - r.request.arrival_s
            compute_s = r.prefill_end_s - r.prefill_sent_s - r.prefill_queue_s
            transfer_s, decode_s = r.first_token_s - r.prefill_end_s, r.last_token_s - r.first_token_s
            stages.append((dispatched_s, r.prefill_queue_s, compute_s, transfer_s, decode_s))
    names = ("dispatch", "prefill_queue", "prefill", "transfer_and_decode_queue", "decode")
    means = [_mean(column) for column in zip(*stages, strict=True)] or [None] * len(names)
    return dict(zip(names, means, strict=True))


def _split_time_without_prefill_leg(scored: Sequence[RequestResult]) -> dict[str, float | None]:
    """Split the mean time of a successful request whose prompt was computed where it decoded."""
    stages = [
        (r.first_token_s - r.request.arrival_s, r.last_token_s - r.first_token_s)
        for r in scored
        if r.outcome is Outcome.OK and r.prefill_end_s is None and r.first_token_s and r.last_token_s
    ]
    to_first_token, decode = (
        (_mean(column) for column in zip(*stages, strict=True)) if stages else (None, None)
    )
    return {"to_first_token": to_first_token, "decode": decode}


def _split_instance_time(result: RunResult) -> dict[str, float | None]:
    """Split the time of all instances: steps with a prompt chunk, other steps, no engine, idle."""
    total_s = result.end_s * (result.options.instances + result.options.cpu_instances)
    if not total_s:
        return dict.fromkeys(("prefill", "decode", "restarting", "idle"))
    prefill, decode, restarting = (part_s / total_s for part_s in (*result.busy_s, result.down_s))
    idle = max(0.0, 1 - prefill - decode - restarting)  # the sum may pass 1 by rounding
    return {"prefill": prefill, "decode": decode, "restarting": restarting, "idle": idle}


def _summarize(values: Iterable[float | None]) -> dict[str, float | None]:
    known = [value for value in values if value is not None]
    return {
        "mean": _mean(known),
        "p50": percentile(known, 50),
        "p90": percentile(known, 90),
        "p99": percentile(known, 99),
    }


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
