"""Safety and liveness checks of a simulation run, judged from its history and its final state.

The checkers do not depend on the load or on the faults and call none of the functions that they check. Each
yields a description of every violation.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise

from fulcrum_core.values import Phase, Role
from tests.simulation.control_loop import SimulationResult

Check = Callable[[SimulationResult], Iterator[str]]


def every_request_ends_once(result: SimulationResult) -> Iterator[str]:
    """No request is lost, and none ends twice."""
    for record in result.requests:
        if record.ends != 1:
            yield f"request {record.request.id} ended {record.ends} times"
    records = Counter(record.request.id for record in result.requests)
    yield from (f"request {name} has {count} records" for name, count in records.items() if count > 1)


def every_token_comes_once_and_in_order(result: SimulationResult) -> Iterator[str]:
    """A complete response has all its tokens; a broken one has the first ones."""
    for record in result.requests:
        count = len(record.token_indices)
        if record.token_indices != list(range(count)):
            yield f"request {record.request.id} got tokens {record.token_indices[:20]}"
        if record.outcome == "ok" and count != record.request.output_tokens:
            yield f"request {record.request.id} got {count} of {record.request.output_tokens} tokens"
        if record.outcome == "failed" and count:
            yield f"request {record.request.id} failed after {count} tokens"


def no_wrong_text(result: SimulationResult) -> Iterator[str]:
    """Every token continues the prompt that was sent."""
    for record in result.requests:
        if record.wrong_tokens:
            yield f"request {record.request.id} got {record.wrong_tokens} tokens of another prompt"


def engine_token_counters_match_emitted_tokens(result: SimulationResult) -> Iterator[str]:
    """Each engine counts exactly the tokens that it emitted, and none died of an invalid request."""
    for process in result.engine_processes:
        counted = process.engine.stats.generation_tokens
        if counted != process.emitted_tokens:
            yield f"engine {process.name}/{process.restarts} counts {counted} tokens and emitted "
            f"{process.emitted_tokens}"
        if process.engine.dead:
            yield f"engine {process.name}/{process.restarts} died of an invalid request"


def kv_stays_within_capacity(result: SimulationResult) -> Iterator[str]:
    """KV cache usage, sampled four times a second, stays between 0 and 1."""
    for event in result.history.of_kind("kv"):
        if not 0 <= event.fields["usage"] <= 1:
            yield f"{event.fields['instance']} used {event.fields['usage']} of its KV cache at "
            f"{event.at_s:.2f}"


def roles_keep_their_floors(result: SimulationResult) -> Iterator[str]:
    """No assignment that the router applied took a role below its floor among the instances then serving."""
    floors = result.service.spec.roles
    before: dict[str, tuple[str, bool]] = {}
    for event in result.history.of_kind("acknowledged"):
        after, serving = event.fields["roles"], event.fields["serving"]
        for role, floor in ((Role.PREFILL, floors.prefill.min), (Role.DECODE, floors.decode.min)):
            had, has = (
                sum(roles.get(name) == (str(role), False) for name in serving) for roles in (before, after)
            )
            if before and has < min(floor, had):
                yield f"{has} of {had} serve {role} after generation {event.fields['generation']}"
        before = after


def floors_stay_assigned(result: SimulationResult) -> Iterator[str]:
    """The assignment always gives each role its floor, whichever instances crash."""
    floors = result.service.spec.roles
    for event in result.history.of_kind("assignment"):
        for role, floor in ((Role.PREFILL, floors.prefill.min), (Role.DECODE, floors.decode.min)):
            count = sum(entry == (str(role), False) for entry in event.fields["roles"].values())
            if count < floor:
                yield f"{count} instances assigned to {role} in generation {event.fields['generation']}"


def every_flip_has_a_reason(result: SimulationResult) -> Iterator[str]:
    """Every flip in the assignment has a reason."""
    for event in result.history.of_kind("flip"):
        if not event.fields["reason"]:
            yield f"the flip of {event.fields['instance']} at {event.at_s:.2f} has no reason"


def no_flip_breaks_the_cooldown(result: SimulationResult) -> Iterator[str]:
    """Every flip to Decode by the autoscaler comes at least the cooldown after the previous flip to
    Decode.
    """
    cooldown_s = result.service.spec.autoscaling.flip.prefill_to_decode_cooldown
    flips = [event.fields for event in result.history.of_kind("flip") if event.fields["to"] == "Decode"]
    times = sorted({flip["since_s"] for flip in flips})
    by_autoscaler = {flip["since_s"] for flip in flips if flip["by"] == "Autoscaler"}
    for earlier, later in pairwise(times):
        if later in by_autoscaler and later - earlier < cooldown_s - 1e-5:  # objects hold microseconds
            yield f"flips to Decode at {earlier:.3f} and {later:.3f}, the cooldown is {cooldown_s} s"


def generations_only_grow(result: SimulationResult) -> Iterator[str]:
    """The router acknowledges generations in increasing order."""
    last = 0
    for event in result.history.of_kind("acknowledged"):
        if event.fields["generation"] <= last:
            yield f"generation {event.fields['generation']} acknowledged after {last}"
        last = event.fields["generation"]


SAFETY: tuple[Check, ...] = (
    every_token_comes_once_and_in_order,
    no_wrong_text,
    engine_token_counters_match_emitted_tokens,
    kv_stays_within_capacity,
    roles_keep_their_floors,
    floors_stay_assigned,
    every_flip_has_a_reason,
    no_flip_breaks_the_cooldown,
    generations_only_grow,
)
"""Checks that hold at every time, under any fault."""


def every_instance_serves(result: SimulationResult) -> Iterator[str]:
    """Crashed engines were restarted and serve."""
    for instance in result.instances:
        if instance.status.phase is not Phase.SERVING:
            yield f"{instance.metadata.name} is {instance.status.phase}"
        if not result.router.instances[instance.metadata.name].serving:
            yield f"the router sends nothing to {instance.metadata.name}"


def the_router_applies_the_assignment(result: SimulationResult) -> Iterator[str]:
    """The router has applied the last generation, and every instance has its assigned role."""
    if result.router.generation != result.assignment.metadata.generation:
        assigned = result.assignment.metadata.generation
        yield f"the router is at generation {result.router.generation}, the assignment at {assigned}"
    for name, entry in result.assignment.spec.roles.items():
        if result.router.instances[name].role is not entry.role:
            yield f"{name} serves {result.router.instances[name].role}, assigned is {entry.role}"


def ledgers_and_caches_are_empty(result: SimulationResult) -> Iterator[str]:
    """Without requests, the router's ledgers and the engines' KV caches are empty."""
    for name, instance in result.router.instances.items():
        ledger = instance.ledger
        remaining = (
            ledger.prefill_queued_s,
            ledger.prefill_tokens,
            ledger.decode_tokens,
            ledger.legs,
            ledger.pending_transfers,
        )
        if any(remaining):
            yield f"the ledger of {name} still has {remaining}"
        gauges = instance.process.engine.gauges if instance.process else None
        if gauges and (gauges.running or gauges.waiting or gauges.leases or gauges.kv_usage):
            yield f"the engine of {name} still has {gauges}"


LIVENESS: tuple[Check, ...] = (
    every_request_ends_once,
    every_instance_serves,
    the_router_applies_the_assignment,
    ledgers_and_caches_are_empty,
)
"""Checks that hold at the end of a run whose faults have ended."""


def violations(result: SimulationResult, *checks: Check) -> list[str]:
    """Return all violations of these checks, each prefixed with its check's name."""
    return [f"{check.__name__}: {found}" for check in checks for found in check(result)]
