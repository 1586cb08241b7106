"""The engine model: vLLM's scheduling, KV blocks and KV transfers, without I/O and on the caller's clock.

Used by the engine server (`server`) in real time, and by simulated runs (`fleet`) in virtual time.
"""

from fulcrum_simulator.engine.engine import Engine
from fulcrum_simulator.engine.links import (
    HANDSHAKE_TIMEOUT_S,
    HandshakeQueue,
    HandshakeResult,
    LinkEnd,
    LinkReservation,
    estimate_transfer_s,
    reserve_transfer,
)
from fulcrum_simulator.engine.outputs import (
    DecodeRun,
    EngineDead,
    EngineEvent,
    ExportedKv,
    Finished,
    FinishReason,
    KvFetch,
    OutputToken,
    Preempted,
    Step,
)
from fulcrum_simulator.engine.requests import (
    EngineRequest,
    KvExportRequest,
    KvImportRequest,
    KvTransfer,
    NoKvTransfer,
    block_hashes,
    pulled_digest,
)
from fulcrum_simulator.engine.stats import EngineGauges, EngineStats, Samples

__all__ = [
    "HANDSHAKE_TIMEOUT_S",
    "DecodeRun",
    "Engine",
    "EngineDead",
    "EngineEvent",
    "EngineGauges",
    "EngineRequest",
    "EngineStats",
    "ExportedKv",
    "FinishReason",
    "Finished",
    "HandshakeQueue",
    "HandshakeResult",
    "KvExportRequest",
    "KvFetch",
    "KvImportRequest",
    "KvTransfer",
    "LinkEnd",
    "LinkReservation",
    "NoKvTransfer",
    "OutputToken",
    "Preempted",
    "Samples",
    "Step",
    "block_hashes",
    "estimate_transfer_s",
    "pulled_digest",
    "reserve_transfer",
]
