"""The outcome that is recorded for a KV transfer whose response is complete."""

import time

import pytest

from fulcrum_core.api import conditions
from fulcrum_router.fleet.instances import Instance
from fulcrum_router.http1.engine_events import PromptUsage
from fulcrum_router.http1.framing import frame_chunk
from fulcrum_router.kv_transfer.verification import KvTransfer, verify_transfer
from fulcrum_router.policy import TransferOutcome, TransferPairs
from fulcrum_router.policy.pair_record import HANDSHAKE_TIMEOUT_S

TOKENS = 320
FETCHED = PromptUsage(TOKENS, TOKENS - 16)
RECOMPUTED = PromptUsage(TOKENS, 0)
TOKEN = frame_chunk(b'data: {"choices":[{"text":"a"}]}\n\n')
USAGE = frame_chunk(b'data: {"choices":[],"usage":{"prompt_tokens":320,"completion_tokens":1}}\n\n')


def create_transfer(*, strips_usage: bool = False) -> KvTransfer:
    return KvTransfer.create(
        TransferPairs(),
        Instance("p-0"),
        Instance("d-0"),
        tokens=TOKENS,
        received_after_s=time.monotonic(),
        strips_usage=strips_usage,
    )


@pytest.mark.parametrize(
    ("usage", "reports_cached_tokens", "expected"),
    [
        pytest.param(FETCHED, False, {TransferOutcome.VERIFIED: 1}, id="all cached tokens: fetched"),
        pytest.param(RECOMPUTED, False, {TransferOutcome.RECOMPUTED: 1}, id="no cached tokens: recomputed"),
        pytest.param(
            PromptUsage(TOKENS, None), False, {TransferOutcome.UNKNOWN: 1}, id="the engine reports none"
        ),
        pytest.param(
            PromptUsage(TOKENS, None),
            True,
            {TransferOutcome.RECOMPUTED: 1},
            id="a missing count means zero if the engine has reported one before",
        ),
        pytest.param(None, True, {TransferOutcome.UNKNOWN: 1}, id="a response without usage"),
        pytest.param(PromptUsage(1, 0), True, {}, id="a prompt of one token has nothing to fetch"),
    ],
)
def test_the_cached_tokens_decide_the_outcome(
    usage: PromptUsage | None, reports_cached_tokens: bool, expected: dict[TransferOutcome, int]
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


@pytest.mark.parametrize(
    ("strips_usage", "chunked", "sent"),
    [
        pytest.param(True, True, TOKEN, id="removed if only the router requested it"),
        pytest.param(False, True, TOKEN + USAGE, id="kept if the client requested it"),
        pytest.param(True, False, TOKEN + USAGE, id="kept in a stream without chunks"),
    ],
)
def test_the_usage_is_read_in_every_stream(strips_usage: bool, chunked: bool, sent: bytes) -> None:
    transfer = create_transfer(strips_usage=strips_usage)
    assert transfer.extract_usage(TOKEN + USAGE, chunked=chunked) == sent
    assert transfer.usage == PromptUsage(TOKENS, None)
