"""One simulated run: engines, router and autoscaler under a workload, from the first arrival to the last end.

All randomness is drawn from the seed, so that the same options and workload give the same result.
`policy_runs` and `bench` call `simulate`, for several services at once `simulate_cells`.
"""

import gc
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TypeVar

from fulcrum_autoscaler.policy import AutoscalingRules
from fulcrum_core.api.pdassignment import PDAssignmentSpec, RoleAssignment
from fulcrum_core.api.pdservice import PDServiceSpec
from fulcrum_core.assignment import AssignmentRules
from fulcrum_core.latency import DecodeModel, PrefillModel
from fulcrum_core.profiles import EngineProfile
from fulcrum_core.values import Actor, DispatchMode, FlipPolicy, Role
from fulcrum_router.policy.predictions.estimate import TYPICAL_REQUEST_TOKENS
from fulcrum_simulator.bounds import UniformFleet, plan_moving_split
from fulcrum_simulator.bounds.rates import count_required
from fulcrum_simulator.fleet.autoscaler import SimulatedAutoscaler
from fulcrum_simulator.fleet.event_queue import EventQueue
from fulcrum_simulator.fleet.flip import SimulatedFlip
from fulcrum_simulator.fleet.instance import InstanceOptions, SimulatedInstance
from fulcrum_simulator.fleet.options import FLIPPING, PLANNED, PolicyName, RunOptions
from fulcrum_simulator.fleet.planners import (
    DynamoLikePlanner,
    KnownSplitPlanner,
    NarwhalLikePlanner,
    SplitPlanner,
)
from fulcrum_simulator.fleet.prompt_blocks import PromptBlocks
from fulcrum_simulator.fleet.published_dispatch import RoundRobin, Xllm
from fulcrum_simulator.fleet.records import RequestResult
from fulcrum_simulator.fleet.routed_instance import RoutedInstance
from fulcrum_simulator.fleet.router import FlipSettings, SimulatedRouter
from fulcrum_simulator.fleet.split_controller import SplitController
from fulcrum_simulator.fleet.timeline import Sample
from fulcrum_simulator.workload import WorkloadRequest

Model = TypeVar("Model", PrefillModel, DecodeModel)
ProgressFunction = Callable[[float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What happened in a run. `first_scored_s`: requests that arrived earlier are not scored."""

    options: RunOptions
    first_roles: Mapping[str, Role]
    """Role of each instance before the first flip."""
    records: tuple[RequestResult, ...]
    flips: tuple[SimulatedFlip, ...]
    samples: tuple[Sample, ...]
    refused_flips: int
    flip_requests: int
    engine_failures: int
    failed_transfers: int
    preemptions: int
    busy_s: tuple[float, float]
    """Of all instances: time of steps with a prompt chunk, and of all other steps."""
    down_s: float
    """Of all instances: time without an engine."""
    first_scored_s: float
    last_arrival_s: float
    end_s: float
    events: int

    @property
    def scored(self) -> list[RequestResult]:
        """The requests that count: offered after the warm-up, whatever became of them."""
        return [r for r in self.records if r.request.arrival_s >= self.first_scored_s]


def simulate(
    workload: Sequence[WorkloadRequest],
    options: RunOptions,
    *,
    on_progress: ProgressFunction = lambda _share: None,
    attainment_min: float = 0.0,
    planner: SplitPlanner | None = None,
) -> RunResult:
    """Run a workload, sorted by arrival. `on_progress` gets the share of the arrivals so far.

    `planner` chooses the splits in place of that of the policy, which must be one of `PLANNED`.

    The run ends as soon as the SLO attainment cannot reach `attainment_min` any more. That of its records is
    then below, too: the requests that have not arrived would have to meet the SLO.
    """
    with _no_garbage_collection():
        run = _Simulation(workload, options, EventQueue(), on_progress, attainment_min, planner)
        run.start()
        while not run.is_over:
            run.events.run_next()
        return run.build_result()


def simulate_cells(
    cells: Sequence[tuple[Sequence[WorkloadRequest], RunOptions]],
    *,
    build_manager: Callable[[Sequence[SimulatedRouter]], Callable[[], None]],
    manage_interval_s: float,
) -> list[RunResult]:
    """Run several services at the same time, each with its own workload.

    `build_manager` gets their routers before the first arrival, and returns a function that is called every
    `manage_interval_s`, first after half of it: both may take instances in and out of service. All services
    run until the last one has ended; flips, samples, events and busy times of each result include that time.
    """
    events = EventQueue()
    with _no_garbage_collection():
        runs = [_Simulation(workload, options, events) for workload, options in cells]
        for run in runs:
            run.start()
        manage = build_manager([run.router for run in runs])

        def look() -> None:
            manage()
            events.schedule(events.now_s + manage_interval_s, look)

        events.schedule(manage_interval_s / 2, look)
        while not all(run.is_over for run in runs):
            events.run_next()
        return [run.build_result() for run in runs]


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keep the garbage collector off: requests leave no reference cycles, and looking for them takes up to a
    fifth of the time with 1,000 instances.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class _Simulation:
    def __init__(
        self,
        workload: Sequence[WorkloadRequest],
        options: RunOptions,
        events: EventQueue,
        on_progress: ProgressFunction = lambda _share: None,
        attainment_min: float = 0.0,
        planner: SplitPlanner | None = None,
    ) -> None:
        self._workload, self._options, self._on_progress = workload, options, on_progress
        self._planner = planner if planner is not None else self._build_planner()
        self._rng = random.Random(options.seed)
        self.events = events
        self._records: list[RequestResult] = []
        self._unfinished: dict[int, RequestResult] = {}
        """Requests in flight by number, in the order of arrival."""
        self._first_scored_s = options.compute_first_scored_s(workload[0].arrival_s, workload[-1].arrival_s)
        self._deadline_s = workload[-1].arrival_s + options.drain_s
        scored = sum(request.arrival_s >= self._first_scored_s for request in workload)
        self._has_goal = attainment_min > 0.0
        self._misses_max = scored - (count_required(scored, attainment_min) if self._has_goal else 0)
        self._misses = 0
        """Scored requests that have ended without meeting the SLO."""
        self._is_lost = False
        """Whether the attainment cannot be reached any more."""
        self._engine_failures = 0
        default = PDServiceSpec(model="simulated", instances=options.instances)
        self._spec = options.service or default
        self._instances = self._build_instances()
        self.router = self._build_router()
        self._autoscaler: SimulatedAutoscaler | SplitController | Xllm | None = self._build_autoscaler()
        published = self._build_published_dispatch()
        if published is not None:
            self.router.choose_routes_by(published)
        if isinstance(published, Xllm):
            self._autoscaler = published  # it flips, too

    def start(self) -> None:
        """Schedule the first events."""
        self.router.start_probes()
        for number, instance in enumerate(self._instances):
            self._schedule_failure(instance, self._find_profile(number).startup_s)
        self._schedule_arrival()

    @property
    def is_over(self) -> bool:
        """Whether all requests have ended, the run has lasted as long as it may, or its goal is missed."""
        if len(self._records) == len(self._workload) and not self._unfinished:
            return True
        return self._is_lost or self.events.next_event_s() > self._deadline_s

    def _build_instances(self) -> list[SimulatedInstance]:
        options = self._options
        names = [*_name_instances(options.instances), *(f"cpu{n}" for n in range(options.cpu_instances))]
        peers: dict[str, SimulatedInstance] = {}
        drawn = random.Random(options.seed)  # not self._rng: CPU instances change nothing else that is drawn
        return [
            SimulatedInstance(
                name,
                InstanceOptions(
                    profile=self._find_profile(number),
                    step_noise=options.control.step_noise,
                    lookahead_steps=options.lookahead_steps,
                ),
                self.events,
                peers,
                random.Random(drawn.getrandbits(64)) if number >= options.instances else self._derive_rng(),
            )
            for number, name in enumerate(names)
        ]

    def _find_first_role(self, number: int) -> Role:
        options, planner = self._options, self._planner
        if options.policy.name is PolicyName.COLOCATED and number < options.instances:
            return Role.BOTH
        prefill = planner.first_prefill if isinstance(planner, KnownSplitPlanner) else options.policy.prefill
        is_prefill = number < prefill or number >= options.instances  # CPU instances come last
        return Role.PREFILL if is_prefill else Role.DECODE

    def _find_profile(self, number: int) -> EngineProfile:
        options = self._options
        profile = options.other_profiles.get(number, options.profile)
        if number >= options.instances:
            profile = _slow_down(options.profile, options.cpu_slowness)
        return _set_token_budget(profile, options.policy.token_budget)

    def _derive_rng(self) -> random.Random:
        return random.Random(self._rng.getrandbits(64))

    # Router and autoscaler

    def _build_router(self) -> SimulatedRouter:
        options, rng = self._options, self._derive_rng()
        error = options.control.model_error

        def build_routed(number: int, instance: SimulatedInstance) -> RoutedInstance:
            profile = self._find_profile(number)
            return RoutedInstance(
                instance,
                self._find_first_role(number),
                _distort(profile.step_model.prefill_model(profile.token_budget), error, rng),
                _distort(profile.step_model.decode_model(TYPICAL_REQUEST_TOKENS), error, rng),
                on_cpu=number >= options.instances,
                pool=profile.name if options.other_profiles else "",
            )

        routed_instances = [build_routed(number, instance) for number, instance in enumerate(self._instances)]
        rules = self._build_rules()
        flips = FlipSettings(
            max_decode_load=rules.shrink,
            cooldown_s=rules.assignment_rules.prefill_to_decode_cooldown_s,
            downtime_s=options.policy.flip_downtime_s,
        )
        router = SimulatedRouter(
            self.events,
            routed_instances,
            slo=options.slo,
            hop_s=options.control.hop_s,
            flips=flips if options.policy.name in FLIPPING - {PolicyName.BALANCED} else None,
            prefill_ahead_s=self._spec.router.dispatch.prefill_ahead
            if options.policy.dispatch is DispatchMode.QUEUE
            else math.inf,
            deflects=options.policy.deflects,
            blocks=PromptBlocks(self._workload, engine_block_tokens=options.profile.block_size)
            if options.prefix_caches
            else None,
            prefix_aware=options.policy.prefix_aware,
            priorities={request.priority for request in self._workload},
            reserved=options.reserved,
            weights=options.weights,
            admission=options.policy.admission,
            tiers={
                tier: options.policy.tier_admission._replace(sheddable=tier not in options.unsheddable_tiers)
                for tier in {request.tier for request in self._workload}
            },
            unjudged=options.unjudged,
        )
        for routed in routed_instances:
            routed.instance.on_restart = partial(router.set_serving, routed, True)
        router.run_canaries()
        for start in options.late_starts:
            routed = routed_instances[start.number]
            router.set_serving(routed, False)
            self.events.schedule(start.begins_s, partial(router.begin_start, routed, start.serves_s))
        return router

    def _build_rules(self) -> AutoscalingRules:
        """Return the rules of the service, with the policy of this run."""
        names = [instance.name for instance in self._instances]
        spec = self._spec
        rules = AutoscalingRules.from_spec(
            spec,
            assignment_rules=AssignmentRules(
                spec.autoscaling.flip.prefill_to_decode_cooldown,
                floors=spec.roles.to_floors(),
                fixed_roles=dict.fromkeys(names[self._options.instances :], Role.PREFILL),
                restarted_by_flip=frozenset(names if self._options.policy.flip_downtime_s else ()),
            ),
        )
        balanced = self._options.policy.name is PolicyName.BALANCED
        return replace(
            rules,
            slo=self._options.slo,
            policy=FlipPolicy.BALANCED if balanced else FlipPolicy.ARROW,
            deflects=self._options.policy.deflects,
        )

    def _build_published_dispatch(self) -> RoundRobin | Xllm | None:
        if self._options.policy.name is PolicyName.ROUND_ROBIN:
            return RoundRobin(self.router.fleet)
        return Xllm(self.router.fleet) if self._options.policy.name is PolicyName.XLLM else None

    def _build_autoscaler(self) -> SimulatedAutoscaler | SplitController | None:
        options, fleet = self._options, self.router.fleet
        if options.policy.name not in FLIPPING | PLANNED:
            return None
        roles = {
            routed.record.name: RoleAssignment(role=routed.record.role, since=0.0, by=Actor.OPERATOR)
            for routed in fleet.instances
        }
        assignment = PDAssignmentSpec(service="simulated", roles=roles)
        late = {
            "state_age_s": options.control.state_age_s,
            "flip_latency_s": options.control.flip_latency_s,
        }
        rules, serving = self._build_rules(), self._list_serving
        if options.policy.name in FLIPPING:
            return SimulatedAutoscaler(self.router, assignment, rules, serving=serving, **late)
        assert self._planner is not None
        return SplitController(
            self._planner,
            self.router,
            assignment,
            rules,
            records=self._records,
            serving=serving,
            kv_capacity_tokens=options.profile.kv_capacity_tokens,
            **late,
        )

    def _list_serving(self) -> list[str]:
        return [routed.record.name for routed in self.router.fleet.instances if routed.instance.alive]

    def _build_planner(self) -> SplitPlanner | None:
        options = self._options
        if options.policy.name not in PLANNED:
            return None
        if options.policy.name is PolicyName.DYNAMO:
            return DynamoLikePlanner()
        if options.policy.name is PolicyName.NARWHAL:
            return NarwhalLikePlanner()
        fleet = UniformFleet(options.instances, options.profile, options.slo)
        known = plan_moving_split(self._workload, fleet, interval_s=options.policy.resplit_s)
        return KnownSplitPlanner(known.interval_s, known.prefill)

    # Events

    def _schedule_arrival(self) -> None:
        if len(self._records) < len(self._workload):
            self.events.schedule(self._workload[len(self._records)].arrival_s, self._arrive)

    def _arrive(self) -> None:
        number = len(self._records)
        record = RequestResult(self._workload[number])
        self._records.append(record)
        self._unfinished[number] = record
        if number % 256 == 0:
            self._on_progress(number / len(self._workload))
            if self._has_goal:
                self._is_lost = self._misses + self._count_late() > self._misses_max
        self.router.serve(record, number, partial(self._end, number))
        self._schedule_arrival()

    def _end(self, number: int) -> None:
        record = self._unfinished.pop(number)
        if record.request.arrival_s >= self._first_scored_s and not record.meets(self._options.slo):
            self._misses += 1
            self._is_lost = self._misses > self._misses_max

    def _count_late(self) -> int:
        """Count the scored requests that still wait for their first token, after the TTFT objective."""
        since_s, late = self.events.now_s - self._options.slo.ttft_s, 0
        for record in self._unfinished.values():
            if record.request.arrival_s >= since_s:
                break
            late += record.first_token_s is None and record.request.arrival_s >= self._first_scored_s
        return late

    def _schedule_failure(self, instance: SimulatedInstance, startup_s: float) -> None:
        rate = self._options.control.failures_per_hour / 3600
        if rate:
            after_s = self._rng.expovariate(rate)
            self.events.schedule(self.events.now_s + after_s, partial(self._fail, instance, startup_s))

    def _fail(self, instance: SimulatedInstance, startup_s: float) -> None:
        if instance.alive:
            self._engine_failures += 1
            self.router.set_serving(self.router.fleet.routed_by_name[instance.name], False)
            instance.fail(startup_s)
        self._schedule_failure(instance, startup_s)

    def build_result(self) -> RunResult:
        """Return what has happened so far."""
        self.router.advance()
        autoscaler = self._autoscaler
        times = [instance.busy_s for instance in self._instances]
        return RunResult(
            options=self._options,
            first_roles={
                instance.name: self._find_first_role(number)
                for number, instance in enumerate(self._instances)
            },
            records=tuple(self._records),
            flips=tuple(autoscaler.flips) if autoscaler else (),
            samples=tuple(self.router.samples),
            refused_flips=autoscaler.refused if autoscaler else 0,
            flip_requests=self.router.flip_requests.seq,
            engine_failures=self._engine_failures,
            failed_transfers=sum(instance.failed_transfers for instance in self._instances),
            preemptions=sum(instance.preemptions for instance in self._instances),
            down_s=math.fsum(instance.down_s for instance in self._instances),
            busy_s=(math.fsum(p for p, _ in times), math.fsum(d for _, d in times)),
            first_scored_s=self._first_scored_s,
            last_arrival_s=self._workload[-1].arrival_s,
            end_s=self.events.now_s,
            events=self.events.executed,
        )


def _slow_down(profile: EngineProfile, factor: float) -> EngineProfile:
    """The profile with all durations of a step multiplied."""
    times = {name: factor * getattr(profile, name) for name in ("t0", "b", "c", "d1", "d2")}
    return profile.model_copy(update=times)


def _set_token_budget(profile: EngineProfile, token_budget: int | None) -> EngineProfile:
    """Replace the token budget; the batch must fit, as `load_profile` checks."""
    if token_budget is None:
        return profile
    max_seqs = min(profile.max_seqs, token_budget)
    return profile.model_copy(update={"token_budget": token_budget, "max_seqs": max_seqs})


def _name_instances(count: int) -> list[str]:
    width = len(str(count - 1))
    return [f"i{number:0{width}}" for number in range(count)]


def _distort(model: Model, error: float, rng: random.Random) -> Model:
    """Multiply each coefficient by a factor between 1 - error and 1 + error."""
    return replace(
        model, **{f.name: getattr(model, f.name) * rng.uniform(1 - error, 1 + error) for f in fields(model)}
    )
