"""The outcome that is recorded for a KV transfer whose response is complete."""

import time

import pytest

from fulcrum_core.api import conditions
from fulcrum_router.fleet.instances import Instance
from fulcrum_router.http1.engine_events import Usage
from fulcrum_router.kv_transfer.verification import KvTransfer, verify_transfer
from fulcrum_router.policy import TransferOutcome, TransferPairs
from fulcrum_router.policy.kv_pairs.pair_record import HANDSHAKE_TIMEOUT_S

TOKENS = 320
FETCHED = Usage(TOKENS, TOKENS - 16)
RECOMPUTED = Usage(TOKENS, 0)


def create_transfer() -> KvTransfer:
    return KvTransfer(
        TransferPairs(),
        Instance("p-0"),
        Instance("d-0"),
        tokens=TOKENS,
        received_after_s=time.monotonic(),
        decode_was_idle=True,
    )


@pytest.mark.parametrize(
    ("usage", "reports_cached_tokens", "expected"),
    [
        pytest.param(FETCHED, False, {TransferOutcome.VERIFIED: 1}, id="all cached tokens: fetched"),
        pytest.param(RECOMPUTED, False, {TransferOutcome.RECOMPUTED: 1}, id="no cached tokens: recomputed"),
        pytest.param(Usage(TOKENS, None), False, {TransferOutcome.UNKNOWN: 1}, id="the engine reports none"),
        pytest.param(
            Usage(TOKENS, None),
            True,
            {TransferOutcome.RECOMPUTED: 1},
            id="a missing count means zero if the engine has reported one before",
        ),
        pytest.param(None, True, {TransferOutcome.UNKNOWN: 1}, id="a response without usage"),
        pytest.param(Usage(1, 0), True, {}, id="a prompt of one token has nothing to fetch"),
    ],
)
def test_the_cached_tokens_decide_the_outcome(
    usage: Usage | None, reports_cached_tokens: bool, expected: dict[TransferOutcome, int]
) -> None:
    transfer = create_transfer()
    transfer.usage, transfer.decode.reports_cached_tokens = usage, reports_cached_tokens
    verify_transfer(transfer, time_to_first_byte_s=0.1)
    assert transfer.pair.counts == {**dict.fromkeys(TransferOutcome, 0), **expected}


@pytest.mark.parametrize(
    ("time_to_first_byte_s", "reason"),
    [
        pytest.param(HANDSHAKE_TIMEOUT_S, conditions.HANDSHAKE_FAILED, id="the handshake timed out"),
        pytest.param(0.1, conditions.INCOMPATIBLE, id="the handshake was refused at once"),
        pytest.param(None, conditions.RECOMPUTED, id="not a stream: the duration is not known"),
    ],
)
def test_the_duration_of_recomputed_first_transfers_shows_the_cause(
    time_to_first_byte_s: float | None, reason: str
) -> None:
    transfer = create_transfer()
    transfer.usage = RECOMPUTED
    for _ in range(10):
        verify_transfer(transfer, time_to_first_byte_s=time_to_first_byte_s)
    assert transfer.pair.reason == reason
