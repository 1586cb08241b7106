"""The engine model: vLLM-like scheduling, KV blocks and hand-offs, pure and on the caller's clock."""

from fulcrum_simulator.engine.engine import Engine
from fulcrum_simulator.engine.events import (
    EngineDead,
    Event,
    FetchStart,
    Finished,
    FinishReason,
    KvExport,
    Preempted,
    Step,
    TokenOut,
)
from fulcrum_simulator.engine.requests import (
    EngineRequest,
    ExportKv,
    Handoff,
    ImportKv,
    NoHandoff,
    block_hashes,
    held_digest,
)
from fulcrum_simulator.engine.stats import EngineStats, Gauges, Samples
from fulcrum_simulator.engine.transfer import (
    HANDSHAKE_TIMEOUT_S,
    Handshake,
    Handshakes,
    LinkEnd,
    Slot,
    reserve_transfer,
    transfer_s,
)

__all__ = [
    "HANDSHAKE_TIMEOUT_S",
    "Engine",
    "EngineDead",
    "EngineRequest",
    "EngineStats",
    "Event",
    "ExportKv",
    "FetchStart",
    "FinishReason",
    "Finished",
    "Gauges",
    "Handoff",
    "Handshake",
    "Handshakes",
    "ImportKv",
    "KvExport",
    "LinkEnd",
    "NoHandoff",
    "Preempted",
    "Samples",
    "Slot",
    "Step",
    "TokenOut",
    "block_hashes",
    "held_digest",
    "reserve_transfer",
    "transfer_s",
]
