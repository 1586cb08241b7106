"""Workloads: recorded ones, generated ones, and changes of their times. Pure but for reading a recording."""

from fulcrum_simulator.workload.generated import (
    CHAT,
    CODE,
    DECODE_HEAVY,
    PREFILL_HEAVY,
    GeneratedLoad,
    LengthLaw,
    LoadPhase,
    Mix,
    Turn,
    bursty,
    moving,
    steady,
)
from fulcrum_simulator.workload.recorded import load_trace
from fulcrum_simulator.workload.requests import LengthLimit, TooLong, WorkloadRequest
from fulcrum_simulator.workload.transforms import alternate, jitter, replay_faster, scale_rate, shift

__all__ = [
    "CHAT",
    "CODE",
    "DECODE_HEAVY",
    "PREFILL_HEAVY",
    "GeneratedLoad",
    "LengthLaw",
    "LengthLimit",
    "LoadPhase",
    "Mix",
    "TooLong",
    "Turn",
    "WorkloadRequest",
    "alternate",
    "bursty",
    "jitter",
    "load_trace",
    "moving",
    "replay_faster",
    "scale_rate",
    "shift",
    "steady",
]
