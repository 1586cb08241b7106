"""What handing KV over costs between the instances of a local run, pair by pair: its router measures it."""

from collections.abc import Iterable

from fulcrum_cli.doctor.findings import Finding, ok, warning
from fulcrum_cli.terminal.ages import format_age
from fulcrum_core.api.conditions import BAD_TRANSFERS
from fulcrum_core.state import PairState, RouterState

NAME = "KV transfer"
TOLD = 6
"""Pairs in one finding: the bad ones first, then the slowest."""


def check_transfer(service: str, state: RouterState | None) -> Finding | None:
    """Handshake, speed and age of each directed pair; None where the router does not answer."""
    if state is None:
        return None
    if not state.pairs:
        return ok(NAME, "no hand-off was seen yet", about=service)
    ranked = sorted(state.pairs, key=_rank)
    seen = "; ".join(_told(pair) for pair in ranked[:TOLD])
    if len(ranked) > TOLD:
        seen += f"; and {len(ranked) - TOLD} more"
    if ranked[0].last_reason in BAD_TRANSFERS:
        advice = "see the condition KVTransferVerified, and the logs of both engines in the run's folder"
        return warning(NAME, seen, advice, about=service)
    return ok(NAME, seen, about=service)


def _rank(pair: PairState) -> tuple[bool, float, str, str]:
    return (
        pair.last_reason not in BAD_TRANSFERS,
        -(pair.seconds_per_1k_tokens or 0.0),
        pair.prefill,
        pair.decode,
    )


def _told(pair: PairState) -> str:
    return f"{pair.prefill} → {pair.decode}: {', '.join((pair.last_reason, *_figures(pair)))}"


def _figures(pair: PairState) -> Iterable[str]:
    if pair.last_proven_s is not None:
        yield f"proven {format_age(pair.last_proven_s)} ago"
    if pair.handshake_s is not None:
        yield f"handshake {pair.handshake_s * 1e3:.0f} ms"
    if pair.seconds_per_1k_tokens is not None:
        yield f"1,000 tokens in {pair.seconds_per_1k_tokens * 1e3:.0f} ms"
