"""What the router decides: pure, so that the simulator runs the very lines that serve production."""

from fulcrum_router.policy.dispatch import (
    Decision,
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

__all__ = [
    "Decision",
    "DecodeEntry",
    "DecodePredictor",
    "Dispatch",
    "FlipRules",
    "FlipWanted",
    "HandoffEntry",
    "InstanceView",
    "Ledger",
    "LedgerView",
    "NoInstance",
    "PredictionError",
    "PrefillEntry",
    "PrefillPredictor",
    "Reason",
    "TokenRatio",
    "choose_decode",
    "choose_prefill",
    "decode_load",
    "prompt_size",
]
