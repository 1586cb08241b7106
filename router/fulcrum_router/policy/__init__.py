"""What the router decides: pure, so that the simulator runs the very lines that serve production."""

from fulcrum_router.policy.dispatch import (
    Decision,
    Delay,
    Dispatch,
    FlipRules,
    FlipWanted,
    InstanceView,
    NoInstance,
    Reason,
    choose_decode,
    choose_prefill,
    decode_load,
)
from fulcrum_router.policy.estimate import (
    DecodePredictor,
    PredictionError,
    PrefillPredictor,
    TokenRatio,
    prompt_size,
)
from fulcrum_router.policy.ledger import DecodeEntry, HandoffEntry, Ledger, LedgerView, PrefillEntry
from fulcrum_router.policy.pairs import Pair, PairKey, PairMap, Proof, judge

__all__ = [
    "Decision",
    "DecodeEntry",
    "DecodePredictor",
    "Delay",
    "Dispatch",
    "FlipRules",
    "FlipWanted",
    "HandoffEntry",
    "InstanceView",
    "Ledger",
    "LedgerView",
    "NoInstance",
    "Pair",
    "PairKey",
    "PairMap",
    "PredictionError",
    "PrefillEntry",
    "PrefillPredictor",
    "Proof",
    "Reason",
    "TokenRatio",
    "choose_decode",
    "choose_prefill",
    "decode_load",
    "judge",
    "prompt_size",
]
