"""What grows with the number of instances: dispatch, the autoscaler's loop, and a simulated request.

    python bench/scale.py [--instances N …] [--seconds S] [--compiled]

Half of the instances of one service is prefill. Per number of instances: CPU of the choice of a prefill and
of a decode instance, of what the router does with all transfer pairs each second (`refresh`, `list_due`),
of a router state as JSON (written, and read by the autoscaler), of a tick of both policies with that state,
and of a simulated request of the workload `stationary` at a load of 60 %. Then a + b·N is fitted to each
column but that of the N²/4 pairs, by least squares of relative errors, and the cores are printed that
dispatch needs for 10,000 requests a second, with one service of all instances or in cells of 50. With
`--compiled` the router is compiled first, as in the image; the rest is not.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from bench.compiled import ensure_compiled
from bench.dispatch import NOW_S, SLO, make_fleet, time_best
from bench.simulation import make_large_load, make_options
from fulcrum_autoscaler.policy import AutoscalingRules, Observation, PolicyState, decide_on_tick
from fulcrum_cli.terminal.output import format_columns
from fulcrum_core.api.pdassignment import PDAssignmentSpec, RoleAssignment
from fulcrum_core.api.pdservice import PDServiceSpec
from fulcrum_core.assignment import AssignmentRules
from fulcrum_core.router_state import DemandState, InstanceState, RouterState
from fulcrum_core.values import Actor, FlipPolicy, Role
from fulcrum_router.policy import Work, choose_decode, choose_prefill
from fulcrum_router.policy.intervals import CANARY_IDLE_S
from fulcrum_simulator.fleet.run import simulate
from tools.compiled.build import describe_router

NUMBERS = 8, 50, 200, 500, 1000
CHOICES, PAIRS = ("prefill choice µs", "decode choice µs"), "pairs ms"
COLUMNS = (
    *CHOICES,
    PAIRS,
    "state ms",
    "arrow tick ms",
    "balanced tick ms",
    "simulated request µs",
)
RATE_RPS, CELL = 10_000, 50


def time_router(count: int) -> tuple[float, float, float]:
    """CPU seconds of the choice of a prefill and of a decode instance, and of all pairs each second."""
    fleet, pairs = make_fleet(count, 1, random.Random(1))
    work, source = Work(1_000, SLO, deadline_s=NOW_S + SLO.ttft_s), fleet.instances[0]
    known = pairs.list_from(source.name)
    rounds = max(20, 20_000 // count)

    def look_after_pairs() -> None:
        pairs.refresh(fleet.instances, now_s=NOW_S)
        pairs.list_due(fleet.instances, now_s=NOW_S, interval_s=CANARY_IDLE_S)

    return (
        time_best(
            lambda: choose_prefill(fleet.candidates, work, now_s=NOW_S, delays=pairs.prefill_delays), rounds
        ),
        time_best(
            lambda: choose_decode(fleet.candidates, work, now_s=NOW_S, prefilled_on=source, pairs=known),
            rounds,
        ),
        time_best(look_after_pairs, 1),
    )


def make_state(count: int, at_s: float) -> RouterState:
    """A state in which all instances have some work."""
    rng = random.Random(count)
    return RouterState(
        service="chat",
        generation=1,
        acknowledged_at_s=0.0,
        at_s=at_s,
        instances=tuple(
            InstanceState(
                name=f"chat-{number:04}",
                role=Role.DECODE if number % 2 else Role.PREFILL,
                serving=True,
                prefill_queued_s=0.0 if number % 2 else rng.uniform(0.0, 0.5),
                prefill_tokens=0 if number % 2 else rng.randrange(5_000),
                decode_tokens=rng.randrange(200_000) if number % 2 else 0,
                decode_legs=rng.randrange(60) if number % 2 else 0,
                legs=rng.randrange(60),
                pending_transfers=0,
                itl_s=0.02,
                kv_usage=0.4,
                engine_requests=30,
                engine_read_at_s=at_s,
                reserved_tokens=0,
                decode_is_full=False,
                max_seqs=256,
                kv_capacity_tokens=430_000,
                itl_intercept_s=0.017,
                itl_slope_s=5e-8,
                on_cpu=False,
            )
            for number in range(count)
        ),
        flip_request_role=None,
        flip_request_seq=0,
        prediction_error=None,
        local_prefills=0,
        tiers=(),
        demand=DemandState(
            requests=int(100 * at_s),
            prefill_s=0.2 * count * at_s,
            output_tokens=500.0 * count * at_s,
            token_steps=1e6 * count * at_s,
        ),
    )


def time_loop(count: int) -> tuple[float, float, float]:
    """CPU seconds of a router state as JSON, written and read, and of a tick of `arrow` and of `balanced`."""
    states = [make_state(count, 100.0 + second) for second in range(3)]
    started_s = time.thread_time()
    for state in states:
        RouterState.model_validate_json(state.model_dump_json())
    json_s = (time.thread_time() - started_s) / len(states)
    roles = {
        state.name: RoleAssignment(role=state.role, since=0.0, by=Actor.OPERATOR)
        for state in states[0].instances
    }
    spec = PDServiceSpec(model="chat", instances=count)
    ticks = []
    for policy in (FlipPolicy.ARROW, FlipPolicy.BALANCED):
        rules = replace(
            AutoscalingRules.from_spec(
                spec, assignment_rules=AssignmentRules(10.0, floors=spec.roles.to_floors())
            ),
            policy=policy,
        )
        policy_state, taken_s = PolicyState(), []
        for state in states:
            observation = Observation(
                assignment=PDAssignmentSpec(service="chat", roles=roles),
                generation=1,
                serving_by_phase=frozenset(roles),
                router=state,
            )
            started_s = time.thread_time()
            policy_state, _ = decide_on_tick(policy_state, observation, rules, now_s=state.at_s)
            taken_s.append(time.thread_time() - started_s)
        ticks.append(max(taken_s))
    return json_s, ticks[0], ticks[1]


def time_simulation(count: int, seconds: float) -> float:
    """CPU seconds of one simulated request."""
    arrivals = make_large_load(count, seconds, seed=1)
    options = make_options(count, seed=1)
    started_s = time.process_time()
    simulate(arrivals, options)
    return (time.process_time() - started_s) / len(arrivals)


def fit_line(numbers: Sequence[int], values: Sequence[float]) -> tuple[float, float]:
    """Least squares of (a + b·n)/value - 1."""
    rows = [(1 / value, number / value) for number, value in zip(numbers, values, strict=True)]
    s11, s12, s22 = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    t1, t2 = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = s11 * s22 - s12 * s12
    return (t1 * s22 - t2 * s12) / determinant, (s11 * t2 - s12 * t1) / determinant


def measure(count: int, seconds: float) -> list[float]:
    """Return the columns for this many instances."""
    prefill_s, decode_s, pairs_s = time_router(count)
    json_s, arrow_s, balanced_s = time_loop(count)
    simulated_s = time_simulation(count, seconds)
    return [
        1e6 * prefill_s,
        1e6 * decode_s,
        1e3 * pairs_s,
        1e3 * json_s,
        1e3 * arrow_s,
        1e3 * balanced_s,
        1e6 * simulated_s,
    ]


def print_table(cells: Callable[[int], Sequence[str]], names: Sequence[str]) -> None:
    """Print one row for each name."""
    print("\n".join(format_columns(("", *COLUMNS), *((n, *cells(i)) for i, n in enumerate(names)))))


def main() -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--instances", type=int, nargs="+", default=NUMBERS)
    parser.add_argument("--seconds", type=float, default=5.0, help="of the simulated workload")
    parser.add_argument("--compiled", action="store_true", help="compile the router first")
    options = parser.parse_args()
    if options.compiled:
        ensure_compiled(describe_router)
    measured = []
    for count in options.instances:
        measured.append(measure(count, options.seconds))
        print(count, *(f"{value:.3g}" for value in measured[-1]), file=sys.stderr)
    print_table(lambda i: [f"{v:.3g}" for v in measured[i]], [str(n) for n in options.instances])
    fits = {}
    for name, column in zip(COLUMNS, zip(*measured, strict=True), strict=True):
        if name != PAIRS:
            fits[name] = fit_line(options.instances, column)
            print(f"{name}: {fits[name][0]:.3g} + {fits[name][1]:.3g}·N")
    for count in (max(options.instances), CELL):
        cores = sum(fits[name][0] + fits[name][1] * count for name in CHOICES) * RATE_RPS / 1e6
        print(f"{RATE_RPS:,} requests/s among {count} instances each: {cores:.1f} cores for dispatch")
    return 0


if __name__ == "__main__":
    sys.exit(main())
