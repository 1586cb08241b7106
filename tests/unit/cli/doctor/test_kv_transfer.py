"""Doctor reports the KV transfers between the instances of a local run."""

import pytest

from fulcrum_cli.doctor.findings import Severity
from fulcrum_cli.doctor.kv_transfer import check_transfer
from fulcrum_core.router_state import PairState, RouterState
from tests.unit.core.router_states import router_state


def pair(
    prefill: str,
    decode: str,
    reason: str = "Verified",
    *,
    verified_age_s: float | None = 3.2,
    handshake_s: float | None = 0.21,
    speed_s: float | None = 0.012,
) -> PairState:
    return PairState(
        prefill=prefill,
        decode=decode,
        verified=1,
        recomputed=0,
        unknown=0,
        verified_age_s=verified_age_s,
        handshake_s=handshake_s,
        transfer_s_per_1k_tokens=speed_s,
        last_reason=reason,
    )


def state(*pairs: PairState) -> RouterState:
    return router_state(pairs=pairs)


@pytest.mark.parametrize(
    ("pairs", "severity", "observed"),
    [
        pytest.param((), Severity.OK, "no KV transfer was observed yet", id="no transfer yet"),
        pytest.param(
            (pair("chat-0", "chat-1"),),
            Severity.OK,
            "chat-0 → chat-1: Verified, verified 3s ago, handshake 210 ms, 1,000 tokens in 12 ms",
            id="all measurements",
        ),
        pytest.param(
            (pair("chat-0", "chat-1", "NoTrafficYet", verified_age_s=None, handshake_s=None, speed_s=None),),
            Severity.OK,
            "chat-0 → chat-1: NoTrafficYet",
            id="no measurement",
        ),
        pytest.param(
            (
                pair("chat-0", "chat-1", verified_age_s=95.0),
                pair(
                    "chat-1", "chat-0", "HandshakeFailed", verified_age_s=None, handshake_s=None, speed_s=None
                ),
            ),
            Severity.WARNING,
            "chat-1 → chat-0: HandshakeFailed; "
            "chat-0 → chat-1: Verified, verified 1m35s ago, handshake 210 ms, 1,000 tokens in 12 ms",
            id="a failing pair comes first",
        ),
    ],
)
def test_pairs_are_reported_with_handshake_speed_and_age(
    pairs: tuple[PairState, ...], severity: Severity, observed: str
) -> None:
    finding = check_transfer("chat", state(*pairs))
    assert finding is not None
    assert (finding.title, finding.severity, finding.observed) == ("chat: KV transfer", severity, observed)


def test_of_many_pairs_the_slowest_are_reported() -> None:
    many = [
        pair(f"chat-{n}", "chat-9", speed_s=n / 1000, verified_age_s=None, handshake_s=None) for n in range(8)
    ]
    finding = check_transfer("chat", state(*many))
    assert finding is not None
    assert finding.observed.startswith("chat-7 → chat-9: Verified, 1,000 tokens in 7 ms; chat-6")
    assert finding.observed.endswith("; and 2 more (8 pairs in all, also of roles not assigned now)")


def test_without_router_state_there_is_no_transfer_finding() -> None:
    assert check_transfer("chat", None) is None
