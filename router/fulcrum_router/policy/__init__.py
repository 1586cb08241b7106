"""The router's decisions: choice of instances, predictions, load ledgers and KV transfer pairs.

Pure: no I/O and no clock, so that the simulator runs the code that production runs.
"""

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
from fulcrum_router.policy.pair_record import PairKey, TransferOutcome, TransferPair, classify_transfer
from fulcrum_router.policy.pairs import TransferPairs

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
