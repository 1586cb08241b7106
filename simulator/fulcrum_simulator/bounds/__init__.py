"""Bounds and references: what the best possible scheduler could reach on a workload, without simulating one.

Bounds hold for every scheduler of identical instances; references are what a named discipline reaches. All
are pure functions of a workload, a profile and an SLO. Simulating real policies is left to other modules.
Letters and numbers (B1 to B5) are those of docs/bounds.md. `fulcrum bounds`, the policy `clairvoyant` and the
bench of policies use them.
"""

from fulcrum_simulator.bounds.decode_burst import count_decodes_on_time_at_most, find_decode_burst_rate
from fulcrum_simulator.bounds.fcfs import count_fcfs_on_time, find_fcfs_rate
from fulcrum_simulator.bounds.fleet import UniformFleet
from fulcrum_simulator.bounds.prefill_burst import count_prefills_on_time_at_most, find_prefill_burst_rate
from fulcrum_simulator.bounds.rates import mean_rate
from fulcrum_simulator.bounds.splits import (
    FixedSplit,
    find_best_fixed_split,
    find_fixed_split_rate,
    find_moving_split_rate,
    plan_moving_split,
)
from fulcrum_simulator.bounds.work import MeanWork, compute_fluid_rate, compute_mean_work, compute_metric_rate

__all__ = [
    "FixedSplit",
    "MeanWork",
    "UniformFleet",
    "compute_fluid_rate",
    "compute_mean_work",
    "compute_metric_rate",
    "count_decodes_on_time_at_most",
    "count_fcfs_on_time",
    "count_prefills_on_time_at_most",
    "find_best_fixed_split",
    "find_decode_burst_rate",
    "find_fcfs_rate",
    "find_fixed_split_rate",
    "find_moving_split_rate",
    "find_prefill_burst_rate",
    "mean_rate",
    "plan_moving_split",
]
