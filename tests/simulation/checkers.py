"""What must hold in every simulated world, told from its history and its end alone.

Checkers know nothing of the load or of the faults and use none of the functions they check. Each returns the
violations it found, in words.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise

from fulcrum_core.values import Phase, Role
from tests.simulation.world import Ended

Check = Callable[[Ended], Iterator[str]]


def every_request_ends_once(ended: Ended) -> Iterator[str]:
    """None lost, none answered twice."""
    for answer in ended.answers:
        if answer.ends != 1:
            yield f"request {answer.request.id} ended {answer.ends} times"
    asked = Counter(answer.request.id for answer in ended.answers)
    yield from (f"request {name} was taken {count} times" for name, count in asked.items() if count > 1)


def every_token_comes_once_and_in_order(ended: Ended) -> Iterator[str]:
    """A whole answer has all its tokens; a broken one has the first ones."""
    for answer in ended.answers:
        count = len(answer.indices)
        if answer.indices != list(range(count)):
            yield f"request {answer.request.id} got tokens {answer.indices[:20]}"
        if answer.outcome == "ok" and count != answer.request.output_tokens:
            yield f"request {answer.request.id} got {count} of {answer.request.output_tokens} tokens"
        if answer.outcome == "failed" and count:
            yield f"request {answer.request.id} failed after {count} tokens"


def no_wrong_text(ended: Ended) -> Iterator[str]:
    """Every token follows from the prompt that was sent."""
    for answer in ended.answers:
        if answer.wrong:
            yield f"request {answer.request.id} got {answer.wrong} tokens of another prompt"


def engines_count_what_they_emit(ended: Ended) -> Iterator[str]:
    """Tokens are conserved: no engine counts more or fewer than it handed out, and none asserts."""
    for life in ended.lives:
        counted = life.engine.stats.generation_tokens
        if counted != life.emitted:
            yield f"engine {life.name}/{life.life} counts {counted} tokens and emitted {life.emitted}"
        if life.engine.dead:
            yield f"engine {life.name}/{life.life} died of what it was sent"


def kv_stays_within_capacity(ended: Ended) -> Iterator[str]:
    """Sampled four times a second."""
    for event in ended.history.of("kv"):
        if not 0 <= event.facts["usage"] <= 1:
            yield f"{event.facts['instance']} used {event.facts['usage']} of its KV cache at {event.at_s:.2f}"


def roles_keep_their_floors(ended: Ended) -> Iterator[str]:
    """No change that the router applied took a role below its floor of the instances then ready."""
    floors = ended.service.spec.roles
    before: dict[str, tuple[str, bool]] = {}
    for event in ended.history.of("acknowledged"):
        after, ready = event.facts["roles"], event.facts["ready"]
        for role, floor in ((Role.PREFILL, floors.prefill.min), (Role.DECODE, floors.decode.min)):
            had, has = (
                sum(roles.get(name) == (str(role), False) for name in ready) for roles in (before, after)
            )
            if before and has < min(floor, had):
                yield f"{has} of {had} serve {role} after generation {event.facts['generation']}"
        before = after


def floors_stay_assigned(ended: Ended) -> Iterator[str]:
    """Whoever crashes: the assignment itself always gives each role its floor."""
    floors = ended.service.spec.roles
    for event in ended.history.of("assignment"):
        for role, floor in ((Role.PREFILL, floors.prefill.min), (Role.DECODE, floors.decode.min)):
            count = sum(entry == (str(role), False) for entry in event.facts["roles"].values())
            if count < floor:
                yield f"{count} instances assigned to {role} in generation {event.facts['generation']}"


def every_flip_says_why(ended: Ended) -> Iterator[str]:
    """Who and why stand beside the role."""
    for event in ended.history.of("flip"):
        if not event.facts["reason"]:
            yield f"the flip of {event.facts['instance']} at {event.at_s:.2f} gives no reason"


def the_cooldown_holds(ended: Ended) -> Iterator[str]:
    """No flip to Decode by the autoscaler follows another flip to Decode by less than the cooldown."""
    cooldown_s = ended.service.spec.autoscaling.flip.prefill_to_decode_cooldown
    flips = [event.facts for event in ended.history.of("flip") if event.facts["to"] == "Decode"]
    times = sorted({flip["since_s"] for flip in flips})
    ours = {flip["since_s"] for flip in flips if flip["by"] == "Autoscaler"}
    for earlier, later in pairwise(times):
        if later in ours and later - earlier < cooldown_s - 1e-5:  # objects hold microseconds
            yield f"flips to Decode at {earlier:.3f} and {later:.3f}, the cooldown is {cooldown_s} s"


def epochs_only_grow(ended: Ended) -> Iterator[str]:
    """The router acknowledges generations in order."""
    last = 0
    for event in ended.history.of("acknowledged"):
        if event.facts["generation"] <= last:
            yield f"generation {event.facts['generation']} acknowledged after {last}"
        last = event.facts["generation"]


SAFETY: tuple[Check, ...] = (
    every_token_comes_once_and_in_order,
    no_wrong_text,
    engines_count_what_they_emit,
    kv_stays_within_capacity,
    roles_keep_their_floors,
    floors_stay_assigned,
    every_flip_says_why,
    the_cooldown_holds,
    epochs_only_grow,
)
"""What holds at every time, whatever goes wrong."""


def every_instance_serves(ended: Ended) -> Iterator[str]:
    """Crashed engines were started again."""
    for instance in ended.instances:
        if instance.status.phase is not Phase.SERVING:
            yield f"{instance.metadata.name} is {instance.status.phase}"
        if not ended.router.instances[instance.metadata.name].serving:
            yield f"the router sends nothing to {instance.metadata.name}"


def the_router_follows_the_wish(ended: Ended) -> Iterator[str]:
    """It has applied the last generation and plays its roles."""
    if ended.router.generation != ended.assignment.metadata.generation:
        yield f"router at {ended.router.generation}, wish at {ended.assignment.metadata.generation}"
    for name, entry in ended.assignment.spec.roles.items():
        if ended.router.instances[name].role is not entry.role:
            yield f"{name} plays {ended.router.instances[name].role}, the wish is {entry.role}"


def the_books_are_empty(ended: Ended) -> Iterator[str]:
    """With no request left, nothing is held for one: not in the router's ledger, not in a KV cache."""
    for name, instance in ended.router.instances.items():
        books = instance.ledger
        rest = (books.prefill_s, books.prefill_tokens, books.decode_tokens, books.legs, books.open_handoffs)
        if any(rest):
            yield f"the ledger of {name} keeps {rest}"
        gauges = instance.process.engine.gauges if instance.process else None
        if gauges and (gauges.running or gauges.waiting or gauges.leases or gauges.kv_usage):
            yield f"the engine of {name} keeps {gauges}"


LIVENESS: tuple[Check, ...] = (
    every_request_ends_once,
    every_instance_serves,
    the_router_follows_the_wish,
    the_books_are_empty,
)
"""What holds at the end of a world in which nothing goes wrong any more."""


def violations(ended: Ended, *checks: Check) -> list[str]:
    """All violations of all checks, each with its check's name."""
    return [f"{check.__name__}: {found}" for check in checks for found in check(ended)]
