"""What doctor says of KV transfer between the instances of a local run."""

import pytest

from fulcrum_cli.doctor.findings import Standing
from fulcrum_cli.doctor.transfer import check_transfer
from fulcrum_core.state import PairState, RouterState
from tests.unit.core.states import router_state


def pair(
    prefill: str,
    decode: str,
    reason: str = "Proven",
    *,
    proven_s: float | None = 3.2,
    handshake_s: float | None = 0.21,
    speed_s: float | None = 0.012,
) -> PairState:
    return PairState(
        prefill=prefill,
        decode=decode,
        proven=1,
        recomputed=0,
        unknown=0,
        last_proven_s=proven_s,
        handshake_s=handshake_s,
        seconds_per_1k_tokens=speed_s,
        last_reason=reason,
    )


def state(*pairs: PairState) -> RouterState:
    return router_state(pairs=pairs)


@pytest.mark.parametrize(
    ("pairs", "standing", "seen"),
    [
        pytest.param((), Standing.OK, "no hand-off was seen yet", id="nothing yet"),
        pytest.param(
            (pair("chat-0", "chat-1"),),
            Standing.OK,
            "chat-0 → chat-1: Proven, proven 3s ago, handshake 210 ms, 1,000 tokens in 12 ms",
            id="all is known",
        ),
        pytest.param(
            (pair("chat-0", "chat-1", "NoTrafficYet", proven_s=None, handshake_s=None, speed_s=None),),
            Standing.OK,
            "chat-0 → chat-1: NoTrafficYet",
            id="nothing is known",
        ),
        pytest.param(
            (
                pair("chat-0", "chat-1", proven_s=95.0),
                pair("chat-1", "chat-0", "HandshakeFailed", proven_s=None, handshake_s=None, speed_s=None),
            ),
            Standing.WARNING,
            "chat-1 → chat-0: HandshakeFailed; "
            "chat-0 → chat-1: Proven, proven 1m35s ago, handshake 210 ms, 1,000 tokens in 12 ms",
            id="a bad pair comes first",
        ),
    ],
)
def test_pairs_are_told_with_handshake_speed_and_age(
    pairs: tuple[PairState, ...], standing: Standing, seen: str
) -> None:
    finding = check_transfer("chat", state(*pairs))
    assert finding is not None
    assert (finding.title, finding.standing, finding.seen) == ("chat: KV transfer", standing, seen)


def test_of_many_pairs_the_slowest_are_told() -> None:
    many = [pair(f"chat-{n}", "chat-9", speed_s=n / 1000, proven_s=None, handshake_s=None) for n in range(8)]
    finding = check_transfer("chat", state(*many))
    assert finding is not None
    assert finding.seen.startswith("chat-7 → chat-9: Proven, 1,000 tokens in 7 ms; chat-6")
    assert finding.seen.endswith("; and 2 more")


def test_a_router_that_does_not_answer_is_somebody_elses_finding() -> None:
    assert check_transfer("chat", None) is None
