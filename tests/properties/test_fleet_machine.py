"""Whatever happens to a service, in any order: floors hold, groups stay able, it comes to rest as asked."""

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from fulcrum_core.assignment import with_flip
from fulcrum_core.values import Actor, Phase, Role
from fulcrum_operator.plan import plan_service
from fulcrum_operator.plan.assignment import rebuilt
from fulcrum_operator.plan.rollout import revision_of
from tests.properties.fleet import BAD, BOTH, Fleet, fleet

POOL = "chat-flex"
BY = st.sampled_from([Actor.PERSON, Actor.AUTOSCALER])


class Service(RuleBasedStateMachine):
    """Pods die, nodes are lost, people scale, roll out, flip and cordon, the operator starts anew."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet: Fleet

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
        self.fleet = fleet(spec)
        self.fleet.change(pools=[{"name": "flex", "instances": bounds}])

    @rule(passes=st.integers(1, 6), wait_s=st.sampled_from([0.0, 1.0, 4.0]))
    def operator(self, passes: int, wait_s: float) -> None:
        for _ in range(passes):
            self._pass()
            self.fleet.wait(wait_s)

    @rule(replicas=st.integers(0, 9))
    def scale(self, replicas: int) -> None:
        self.fleet.scale(POOL, replicas)

    @rule(image=st.sampled_from(["a", "b"]), profile=st.sampled_from(["laptop", "laptop", BAD]))
    def roll_out(self, image: str, profile: str) -> None:
        self.fleet.change(engine={"image": image, "profile": profile})

    @rule(surge=st.integers(0, 2), unavailable=st.integers(0, 2), paused=st.booleans())
    def rollout_rules(self, surge: int, unavailable: int, paused: bool) -> None:
        if surge + unavailable:
            rules = {"maxSurge": surge, "maxUnavailable": unavailable, "paused": paused}
            self.fleet.change(rollout={**rules, "progressDeadline": "60s"})

    @rule(data=st.data(), by=BY, to=st.sampled_from(BOTH))
    def flip(self, data: st.DataObject, by: Actor, to: Role) -> None:
        assert self.fleet.assignment
        spec = self.fleet.assignment.spec
        name = data.draw(st.sampled_from(sorted(spec.roles)))
        self.fleet.wish(with_flip(spec, name, to, by=by, reason="so", now_s=self.fleet.now_s))

    @rule(data=st.data(), cordoned=st.booleans())
    def cordon(self, data: st.DataObject, cordoned: bool) -> None:
        assert self.fleet.assignment
        spec = self.fleet.assignment.spec
        name = data.draw(st.sampled_from(sorted(spec.roles)))
        word = {"cordoned": cordoned, "cordoned_by": Actor.PERSON if cordoned else None}
        entry = spec.roles[name].model_copy(update=word)
        self.fleet.wish(spec.model_copy(update={"roles": {**spec.roles, name: entry}}))

    @precondition(lambda self: self.fleet.engines)
    @rule(data=st.data(), what=st.sampled_from(["crash", "lost", "gone", "evicted"]))
    def fault(self, data: st.DataObject, what: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.fleet.engines)))
        if what == "crash":
            self.fleet.crash(name)
        elif what == "evicted":
            self.fleet.evict(name)
        else:
            self.fleet.lose(name, gone=what == "gone")

    @rule(up=st.booleans())
    def router(self, up: bool) -> None:
        self.fleet.router_up = up

    @rule()
    def operator_restart(self) -> None:
        self.fleet.accepted = None

    def _pass(self) -> None:
        """One pass: what it takes from a role voluntarily never goes below the floor."""
        there = self.fleet
        judged = there.accepted or rebuilt(there.observed())
        disturbed = set(there.disturbed)
        before = {role: there.at_work(judged, role) - disturbed if judged else set() for role in BOTH}
        seen, plan = there.act()
        assert plan == plan_service(seen)
        assert not {i.metadata.name for i in plan.start} & set(plan.stop)
        assert not {i.metadata.name for i in plan.start} & set(seen.engines)
        assert there.assignment
        assert set(there.instances) >= set(there.assignment.spec.roles) - {
            obj.metadata.name for obj in plan.delete
        }
        floors = there.service.spec.roles.floors()
        for role in BOTH:
            taken = {i.metadata.name for i in seen.instances if seen.taken(i)}
            had = {name for name in before[role] if name not in taken and name in seen.engines}
            now = there.at_work(there.assignment.spec, role)
            assert len(now) >= min(len(had), floors.of(role)), (role, had, now, there.told())
        assert there.lonely_groups() == [], there.told()

    def teardown(self) -> None:
        """Once the faults end and nobody asks for the impossible, all is as asked."""
        if not hasattr(self, "fleet"):
            return
        there = self.fleet
        there.router_up = True
        there.change(engine={"image": "z"}, rollout={"maxSurge": 1, "progressDeadline": "60s"})
        assert there.assignment
        entries = there.assignment.spec.roles.items()
        lifted = {n: e.model_copy(update={"cordoned": False, "cordoned_by": None}) for n, e in entries}
        there.wish(there.assignment.spec.model_copy(update={"roles": lifted}))
        floors = there.service.spec.roles.floors()
        replicas = max(there.pools[POOL].spec.replicas, floors.prefill + floors.decode)
        there.scale(POOL, replicas)
        there.settle()
        wanted = there.service.spec.pools[0].instances.clamp(replicas)
        up = [i for i in there.instances.values() if i.status.phase is Phase.SERVING]
        assert len(up) == len(there.instances) == len(there.engines) == wanted, there.told()
        pool = there.pools[POOL]
        assert {revision_of(i) for i in up} == {pool.spec.start_revision} == {pool.status.revision}
        assert {name: engine.made_from.spec.engine for name, engine in there.engines.items()} == {
            i.metadata.name: i.spec.engine for i in up
        }
        assert not plan_service(there.observed()).start


TestService = Service.TestCase
TestService.settings = settings(
    max_examples=15,
    stateful_step_count=20,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
