"""What handing KV over costs between the instances of a local run, pair by pair: its router measures it."""

from collections.abc import Iterable

from fulcrum_cli.doctor.findings import Finding, ok, warning
from fulcrum_cli.terminal.ages import format_age
from fulcrum_core.api.conditions import KV_TRANSFER_PROBLEMS
from fulcrum_core.router_state import PairState, RouterState

NAME = "KV transfer"
PAIRS_NAMED_MAX = 6
"""Pairs in one finding: the bad ones first, then the slowest."""


def check_transfer(service: str, state: RouterState | None) -> Finding | None:
    """Handshake, speed and age of each directed pair; None where the router does not answer."""
    if state is None:
        return None
    if not state.pairs:
        return ok(NAME, "no hand-off was seen yet", service=service)
    ranked = sorted(state.pairs, key=_sort_key)
    observed = "; ".join(_format_pair(pair) for pair in ranked[:PAIRS_NAMED_MAX])
    if len(ranked) > PAIRS_NAMED_MAX:
        observed += f"; and {len(ranked) - PAIRS_NAMED_MAX} more"
    if ranked[0].last_reason in KV_TRANSFER_PROBLEMS:
        advice = "see the condition KVTransferVerified, and the logs of both engines in the run's folder"
        return warning(NAME, observed, advice, service=service)
    return ok(NAME, observed, service=service)


def _sort_key(pair: PairState) -> tuple[bool, float, str, str]:
    return (
        pair.last_reason not in KV_TRANSFER_PROBLEMS,
        -(pair.transfer_s_per_1k_tokens or 0.0),
        pair.prefill,
        pair.decode,
    )


def _format_pair(pair: PairState) -> str:
    return f"{pair.prefill} → {pair.decode}: {', '.join((pair.last_reason, *_format_measurements(pair)))}"


def _format_measurements(pair: PairState) -> Iterable[str]:
    if pair.verified_age_s is not None:
        yield f"verified {format_age(pair.verified_age_s)} ago"
    if pair.handshake_s is not None:
        yield f"handshake {pair.handshake_s * 1e3:.0f} ms"
    if pair.transfer_s_per_1k_tokens is not None:
        yield f"1,000 tokens in {pair.transfer_s_per_1k_tokens * 1e3:.0f} ms"
