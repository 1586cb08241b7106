"""What the router decides: pure, so that the simulator runs the very lines that serve production."""

from fulcrum_router.policy.dispatch import (
    Dispatch,
    DispatchDecision,
    DispatchReason,
    FlipProposal,
    FlipProposalRules,
    InstanceView,
    NoInstance,
    TransferDelay,
    choose_decode,
    choose_prefill,
    compute_decode_load,
)
from fulcrum_router.policy.estimate import (
    DecodePredictor,
    PredictionErrorMean,
    PrefillPredictor,
    TokensPerByte,
    measure_prompt,
)
from fulcrum_router.policy.ledger import DecodeEntry, Ledger, LedgerView, PendingTransferEntry, PrefillEntry
from fulcrum_router.policy.pairs import (
    PairKey,
    TransferOutcome,
    TransferPair,
    TransferPairs,
    classify_transfer,
)

__all__ = [
    "DecodeEntry",
    "DecodePredictor",
    "Dispatch",
    "DispatchDecision",
    "DispatchReason",
    "FlipProposal",
    "FlipProposalRules",
    "InstanceView",
    "Ledger",
    "LedgerView",
    "NoInstance",
    "PairKey",
    "PendingTransferEntry",
    "PredictionErrorMean",
    "PrefillEntry",
    "PrefillPredictor",
    "TokensPerByte",
    "TransferDelay",
    "TransferOutcome",
    "TransferPair",
    "TransferPairs",
    "choose_decode",
    "choose_prefill",
    "classify_transfer",
    "compute_decode_load",
    "measure_prompt",
]
