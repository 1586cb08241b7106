"""What else could have served the recorded traffic: other policies, splits and numbers of instances.

The command `regret` lists them and runs each in the simulator; here they are only options of a run.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fulcrum_cli.simulation.options import INSTANCES_MAX
from fulcrum_core.api.pdservice import PDServiceSpec
from fulcrum_core.values import DispatchMode
from fulcrum_simulator.fleet.options import Policy, PolicyName, list_splits

EXTRA_INSTANCES = (-1, 1, 2)
"""Numbers of instances to try, relative to the recorded one."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """One way to serve the traffic; of several policies, the best one counts."""

    instances: int
    policies: tuple[Policy, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RanAs:
    """How the service ran when its requests were recorded."""

    spec: PDServiceSpec
    """The service, with flips allowed: its fixed split ran if it did not flip."""
    policy: PolicyName
    prefill: int
    """Prefill instances when the requests were read: the split to start with."""
    instances: int

    def list_alternatives(self) -> Iterator[Alternative]:
        """What ran; the other policies; all fixed splits; mode Queue; deflection on or off; other instance
        counts."""
        ran = self._make_policy(self.policy, self.instances)
        yield Alternative(self.instances, (ran,))
        for name in (PolicyName.ARROW, PolicyName.BALANCED):
            if name is not self.policy:
                yield Alternative(self.instances, (self._make_policy(name, self.instances),))
        splits = list_splits(self.instances)
        yield Alternative(self.instances, tuple(self._with_dispatch(split) for split in splits))
        if ran.dispatch is DispatchMode.DIRECT:
            yield Alternative(self.instances, (replace(ran, dispatch=DispatchMode.QUEUE),))
        yield Alternative(self.instances, (replace(ran, deflects=not ran.deflects),))
        for extra in EXTRA_INSTANCES:
            if 2 <= self.instances + extra <= INSTANCES_MAX:
                policy = self._make_policy(self.policy, self.instances + extra)
                yield Alternative(self.instances + extra, (policy,))

    def _make_policy(self, name: PolicyName, instances: int) -> Policy:
        prefill = min(max(1, self.prefill), instances - 1)
        return self._with_dispatch(Policy(name, prefill, instances - prefill))

    def _with_dispatch(self, policy: Policy) -> Policy:
        dispatch = self.spec.router.dispatch
        return replace(policy, dispatch=dispatch.mode, deflects=dispatch.deflect)
