"""Check of KV transfers between the instances of a local run, by the router's measurements of each pair.

`examine` calls it. In a cluster people cannot read the router: there the condition KVTransferVerified says it
(`services`).
"""

from collections.abc import Iterable

from fulcrum_cli.doctor.findings import CheckId, Finding, ok, warning
from fulcrum_cli.terminal.output import format_age
from fulcrum_core.api.conditions import KV_TRANSFER_PROBLEMS
from fulcrum_core.router_state import PairState, RouterState

_CHECK = CheckId.KV_TRANSFER
PAIRS_NAMED_MAX = 6
"""Pairs named in one finding: failing pairs first, then the slowest."""


def check_transfer(service: str, state: RouterState | None) -> Finding | None:
    """Report handshake, speed and age of each directed pair; None if the router does not respond."""
    if state is None:
        return None
    if not state.pairs:
        return ok(_CHECK, "no KV transfer was observed yet", service=service)
    ranked = sorted(state.pairs, key=_sort_key)
    observed = "; ".join(_format_pair(pair) for pair in ranked[:PAIRS_NAMED_MAX])
    if len(ranked) > PAIRS_NAMED_MAX:
        more = len(ranked) - PAIRS_NAMED_MAX
        observed += f"; and {more} more ({len(ranked)} pairs in all, also of roles not assigned now)"
    if ranked[0].last_reason in KV_TRANSFER_PROBLEMS:
        advice = "see the condition KVTransferVerified, and the logs of both engines in the run's folder"
        return warning(_CHECK, observed, advice, service=service)
    return ok(_CHECK, observed, service=service)


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
