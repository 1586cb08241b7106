"""A service under any sequence of faults and edits: floors are kept, and it settles as specified."""

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from fulcrum_core.api import Floors
from fulcrum_core.assignment import build_flip
from fulcrum_core.values import Actor, Phase, Role
from fulcrum_operator.plan import plan_service
from fulcrum_operator.plan.assignment import rebuild_accepted_assignment
from fulcrum_operator.plan.instance_state import engine_lost, revision_of
from tests.properties.simulated_service import BAD_PROFILE, BOTH, SimulatedService, make_settled_service

POOL = "chat-flex"
BY = st.sampled_from([Actor.PERSON, Actor.AUTOSCALER])


class ServiceMachine(RuleBasedStateMachine):
    """Pods die, nodes are lost, people scale, roll out, flip and cordon, the operator restarts."""

    def __init__(self) -> None:
        super().__init__()
        self.simulated: SimulatedService

    @initialize(count=st.integers(1, 5), floors=st.tuples(st.integers(1, 2), st.integers(1, 2)),
                strategy=st.sampled_from(["Auto", "Restart"]))  # fmt: skip
    def apply(self, count: int, floors: tuple[int, int], strategy: str) -> None:
        bounds = {"min": 1, "max": 8}
        spec: dict[str, Any] = {
            "pools": [{"name": "flex", "instances": {**bounds, "min": count}}],
            "roles": {"prefill": {"min": floors[0]}, "decode": {"min": floors[1]}},
            "autoscaling": {"flip": {"strategy": strategy}, "scale": {"owner": "External"}},
            "rollout": {"progressDeadline": "60s"},
        }
        self.simulated = make_settled_service(spec)
        self.simulated.edit_service(pools=[{"name": "flex", "instances": bounds}])

    @rule(reconciles=st.integers(1, 6), wait_s=st.sampled_from([0.0, 1.0, 4.0]))
    def operator(self, reconciles: int, wait_s: float) -> None:
        for _ in range(reconciles):
            self._reconcile()
            self.simulated.advance(wait_s)

    @rule(replicas=st.integers(0, 9))
    def scale(self, replicas: int) -> None:
        self.simulated.scale(POOL, replicas)

    @rule(image=st.sampled_from(["a", "b"]), profile=st.sampled_from(["laptop", "laptop", BAD_PROFILE]))
    def roll_out(self, image: str, profile: str) -> None:
        self.simulated.edit_service(engine={"image": image, "profile": profile})

    @rule(surge=st.integers(0, 2), unavailable=st.integers(0, 2), paused=st.booleans())
    def rollout_rules(self, surge: int, unavailable: int, paused: bool) -> None:
        if surge + unavailable:
            rules = {"maxSurge": surge, "maxUnavailable": unavailable, "paused": paused}
            self.simulated.edit_service(rollout={**rules, "progressDeadline": "60s"})

    @rule(data=st.data(), by=BY, to=st.sampled_from(BOTH))
    def flip(self, data: st.DataObject, by: Actor, to: Role) -> None:
        assert self.simulated.assignment
        spec = self.simulated.assignment.spec
        name = data.draw(st.sampled_from(sorted(spec.roles)))
        self.simulated.write_assignment(
            build_flip(spec, name, to, by=by, reason="test", now_s=self.simulated.now_s)
        )

    @rule(data=st.data(), cordoned=st.booleans())
    def cordon(self, data: st.DataObject, cordoned: bool) -> None:
        assert self.simulated.assignment
        spec = self.simulated.assignment.spec
        name = data.draw(st.sampled_from(sorted(spec.roles)))
        fields = {"cordoned": cordoned, "cordoned_by": Actor.PERSON if cordoned else None}
        entry = spec.roles[name].model_copy(update=fields)
        self.simulated.write_assignment(spec.model_copy(update={"roles": {**spec.roles, name: entry}}))

    @precondition(lambda self: self.simulated.engines)
    @rule(data=st.data(), kind=st.sampled_from(["crash", "lost", "gone", "evicted"]))
    def fault(self, data: st.DataObject, kind: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.simulated.engines)))
        if kind == "crash":
            self.simulated.crash(name)
        elif kind == "evicted":
            self.simulated.evict(name)
        else:
            self.simulated.lose_engine(name, deleted=kind == "gone")

    @rule(up=st.booleans())
    def router(self, up: bool) -> None:
        self.simulated.router_up = up

    @rule()
    def operator_restart(self) -> None:
        self.simulated.accepted = None

    def _reconcile(self) -> None:
        """Reconcile once, and check that the operator takes no role below its floor."""
        simulated = self.simulated
        accepted = simulated.accepted or rebuild_accepted_assignment(simulated.observe())
        disturbed = set(simulated.disturbed)
        before = {
            role: simulated.serving_names(accepted, role) - disturbed if accepted else set() for role in BOTH
        }
        observed, plan = simulated.reconcile()
        assert plan == plan_service(observed)
        assert not {i.metadata.name for i in plan.start} & set(plan.stop)
        assert not {i.metadata.name for i in plan.start} & set(observed.engines)
        assert simulated.assignment
        assert set(simulated.instances) >= set(simulated.assignment.spec.roles) - {
            obj.metadata.name for obj in plan.delete
        }
        floors = simulated.service.spec.roles.to_floors()
        bounds = simulated.pools[POOL].spec.instances
        if bounds.clamp(simulated.pools[POOL].spec.replicas) == 1 and floors == Floors():
            floors = Floors(prefill=0, decode=1)  # the single instance plays Both
        for role in BOTH:
            lost = {i.metadata.name for i in observed.instances if engine_lost(observed, i)}
            had = {name for name in before[role] if name not in lost and name in observed.engines}
            now = simulated.serving_names(simulated.assignment.spec, role)
            assert len(now) >= min(len(had), floors.for_role(role)), (role, had, now, simulated.describe())
        assert simulated.groups_missing_a_role() == [], simulated.describe()

    def teardown(self) -> None:
        """Once the faults have ended and the edits are possible to satisfy, the service reaches its spec."""
        if not hasattr(self, "simulated"):
            return
        simulated = self.simulated
        simulated.router_up = True
        simulated.reconcile()  # an edit that is not allowed is refused with all that is written beside it
        simulated.edit_service(engine={"image": "z"}, rollout={"maxSurge": 1, "progressDeadline": "60s"})
        assert simulated.assignment
        entries = simulated.assignment.spec.roles.items()
        uncordoned = {n: e.model_copy(update={"cordoned": False, "cordoned_by": None}) for n, e in entries}
        simulated.write_assignment(simulated.assignment.spec.model_copy(update={"roles": uncordoned}))
        floors = simulated.service.spec.roles.to_floors()
        replicas = max(simulated.pools[POOL].spec.replicas, floors.prefill + floors.decode)
        simulated.scale(POOL, replicas)
        simulated.settle()
        expected_count = simulated.service.spec.pools[0].instances.clamp(replicas)
        up = [i for i in simulated.instances.values() if i.status.phase is Phase.SERVING]
        assert len(up) == len(simulated.instances) == len(simulated.engines) == expected_count, (
            simulated.describe()
        )
        pool = simulated.pools[POOL]
        assert {revision_of(i) for i in up} == {pool.spec.launch_revision} == {pool.status.revision}
        assert {name: engine.created_from.spec.engine for name, engine in simulated.engines.items()} == {
            i.metadata.name: i.spec.engine for i in up
        }
        assert not plan_service(simulated.observe()).start


TestServiceMachine = ServiceMachine.TestCase
TestServiceMachine.settings = settings(
    max_examples=15,
    stateful_step_count=20,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
