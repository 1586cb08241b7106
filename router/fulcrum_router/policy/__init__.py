"""The router's decisions: choice of instances, predictions, load ledgers and KV transfer pairs.

Pure: no I/O and no clock, so that the simulator runs the code that production runs.
"""

from fulcrum_router.policy.candidates import Candidates
from fulcrum_router.policy.dispatch import (
    Dispatch,
    DispatchDecision,
    DispatchReason,
    FlipProposal,
    FlipProposalRules,
    NoInstance,
    choose_decode,
    choose_prefill,
    compute_decode_load,
)
from fulcrum_router.policy.instance_record import InstanceRecord
from fulcrum_router.policy.kv_pairs.pair_record import (
    PairKey,
    SourcePairs,
    TransferDelay,
    TransferOutcome,
    TransferPair,
    classify_transfer,
)
from fulcrum_router.policy.kv_pairs.pairs import TransferPairs
from fulcrum_router.policy.ledger import (
    DecodeEntry,
    Ledger,
    PendingTransferEntry,
    PrefillEntry,
    Reservation,
)
from fulcrum_router.policy.predictions.estimate import (
    DecodePredictor,
    PredictionErrorMean,
    PrefillPredictor,
    TokensPerByte,
)
from fulcrum_router.policy.predictions.prediction import PredictedTtft, TtftErrors, predict_ttft
from fulcrum_router.policy.work import Work

__all__ = [
    "Candidates",
    "DecodeEntry",
    "DecodePredictor",
    "Dispatch",
    "DispatchDecision",
    "DispatchReason",
    "FlipProposal",
    "FlipProposalRules",
    "InstanceRecord",
    "Ledger",
    "NoInstance",
    "PairKey",
    "PendingTransferEntry",
    "PredictedTtft",
    "PredictionErrorMean",
    "PrefillEntry",
    "PrefillPredictor",
    "Reservation",
    "SourcePairs",
    "TokensPerByte",
    "TransferDelay",
    "TransferOutcome",
    "TransferPair",
    "TransferPairs",
    "TtftErrors",
    "Work",
    "choose_decode",
    "choose_prefill",
    "classify_transfer",
    "compute_decode_load",
    "predict_ttft",
]
