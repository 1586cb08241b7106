"""The journey: one request as a pure state machine, with the retry and flip rules of the router.

The class `Journey` is built in four layers, each a module and a subclass of the one before: `record` (what is
known of one request), `eligible` (the instances that may take it), `choices` (which of them do, whether it
waits, which flip it asks for) and `machine` (its events). `states` is the vocabulary, `context` what all
journeys share, and `protocols` the table of KV transfer protocols.
"""

from fulcrum_router.policy.journey.choices import MAX_ATTEMPTS
from fulcrum_router.policy.journey.context import (
    FLIP_WAIT_BACKOFF_S,
    FLIP_WAIT_S,
    FleetView,
    FlipWaits,
    JourneyContext,
)
from fulcrum_router.policy.journey.machine import Journey
from fulcrum_router.policy.journey.protocols import NIXL_PULL, TransferProtocol
from fulcrum_router.policy.journey.states import Action, LocalPrefillReason, State, StopReason

__all__ = [
    "FLIP_WAIT_BACKOFF_S",
    "FLIP_WAIT_S",
    "MAX_ATTEMPTS",
    "NIXL_PULL",
    "Action",
    "FleetView",
    "FlipWaits",
    "Journey",
    "JourneyContext",
    "LocalPrefillReason",
    "State",
    "StopReason",
    "TransferProtocol",
]
