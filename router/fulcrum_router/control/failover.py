"""Which of a service's routers gets its traffic: one is active, the others keep warm and wait.

The active one, chosen by a Lease, writes its own address into the service's EndpointSlice, and that is the
one thing that directs traffic. It goes on while the API server is away, since nobody could replace it; should
two be active for a moment, what they serve does no harm.
"""

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from fulcrum_cluster.leader_election import ROUTER_TIMING, KubernetesLease, LeaderElector, StepDown
from fulcrum_cluster.objects import ENDPOINT_SLICE, Object, ObjectApi
from fulcrum_core.errors import Conflict, StoreError
from fulcrum_core.ports import Clock
from fulcrum_router.router import Router

log = structlog.get_logger()

HANDOVER_TIMEOUT_S = 5.0
"""How long a router that was told to end goes on taking new requests at most."""
LINGER_S = 3.0
"""How long it does so after its successor has stepped in: until every node directs connections there."""
SLICE_CHECK_INTERVAL_S = 2.0
"""How often the active one looks whether the slice still says so."""
SLICE_RETRY_S = 0.5
SUCCESSOR_POLL_S = 0.1
"""How often a leaving router looks for its successor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterEndpoint:
    """Where one router listens, and under which names that is kept."""

    name: str
    """Of the Lease and of the EndpointSlice."""
    namespace: str
    identity: str
    address: str
    port: int
    state_port: int

    def slice_ports(self) -> list[dict[str, Any]]:
        """As the slice says it; the names are those of the Service's ports."""
        named = (("http", self.port), ("state", self.state_port))
        return [{"name": name, "port": port, "protocol": "TCP"} for name, port in named]

    def slice_patch(self) -> dict[str, Any]:
        """What makes the slice direct all traffic here."""
        pod = {"kind": "Pod", "namespace": self.namespace, "name": self.identity}
        ready = {"ready": True, "serving": True, "terminating": False}
        endpoint = {"addresses": [self.address], "conditions": ready, "targetRef": pod}
        return {"endpoints": [endpoint], "ports": self.slice_ports()}

    def matches_slice(self, found: Mapping[str, Any]) -> bool:
        """Whether the slice does so already."""
        ports = {(port.get("name"), port.get("port")) for port in found.get("ports") or ()}
        here = {(port["name"], port["port"]) for port in self.slice_ports()}
        return _addresses(found) == [self.address] and ports == here


class Failover:
    """One router's part in it."""

    def __init__(
        self,
        router: Router,
        objects: ObjectApi,
        endpoint: RouterEndpoint,
        *,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._router, self._objects, self._endpoint, self._clock = router, objects, endpoint, clock
        self._elector = LeaderElector(
            KubernetesLease(objects, endpoint.name, namespace=endpoint.namespace),
            identity=endpoint.identity,
            timing=ROUTER_TIMING,
            step_down=StepDown.WHEN_REPLACED,
            clock=clock,
            rng=rng,
            on_change=self._on_leadership_change,
        )
        self._leadership_changed = asyncio.Event()
        self._last_active_s = -HANDOVER_TIMEOUT_S
        self._slice_written = True
        router.active = False

    async def run(self) -> None:
        """Stand for election, and direct the traffic here while elected, until cancelled.

        What the store answers is dealt with below. After a fault of our own it begins anew: a router that
        went on serving without standing for election would be one too many, and nobody would know.
        """
        while True:
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._elector.run())
                    tasks.create_task(self._reconcile_slice())
            except Exception:
                log.exception("election begins anew after a fault of the router")
            await asyncio.sleep(SLICE_RETRY_S)

    async def hand_over(self) -> None:
        """After `run`: let another one take over, serving on until clients are directed there.

        Returns after `HANDOVER_TIMEOUT_S` at the latest, also where no other one is left.
        """
        end_s = self._clock.monotonic_s() + HANDOVER_TIMEOUT_S
        if self._elector.leading:
            await self._elector.release()
        elif self._clock.monotonic_s() - self._last_active_s > HANDOVER_TIMEOUT_S:
            return
        while self._clock.monotonic_s() < end_s and not await self._has_successor():
            await asyncio.sleep(SUCCESSOR_POLL_S)
        self._router.leaving = True
        await asyncio.sleep(max(0.0, min(LINGER_S, end_s - self._clock.monotonic_s())))

    def _on_leadership_change(self, leading: bool) -> None:
        if leading:
            self._router.become_active()
        else:
            self._router.active = False
            self._last_active_s = self._clock.monotonic_s()
        self._leadership_changed.set()

    async def _reconcile_slice(self) -> None:
        while True:
            self._leadership_changed.clear()
            pause_s = SLICE_CHECK_INTERVAL_S
            if self._elector.leading and not await self._ensure_slice():
                pause_s = SLICE_RETRY_S
            try:
                async with asyncio.timeout(pause_s):
                    await self._leadership_changed.wait()
            except TimeoutError:
                continue

    async def _ensure_slice(self) -> bool:
        """Whether the slice directs traffic here now."""
        try:
            found = await self._get_slice()
            if not self._endpoint.matches_slice(found):
                if _addresses(found):
                    await self._elector.try_to_lead()  # is it another active one's by now?
                if not self._elector.leading:
                    return True
                await self._patch_slice(found)
        except Conflict:
            return False
        except StoreError as error:
            if self._slice_written:
                log.warning("endpoint not written", slice=self._endpoint.name, reason=str(error))
            self._slice_written = False
            return False
        self._slice_written = True
        return True

    async def _patch_slice(self, found: Object) -> None:
        endpoint = self._endpoint
        await self._objects.patch(
            ENDPOINT_SLICE,
            endpoint.name,
            endpoint.slice_patch(),
            namespace=endpoint.namespace,
            resource_version=found["metadata"]["resourceVersion"],
        )
        log.info(
            "traffic directed here", slice=endpoint.name, address=endpoint.address, before=_addresses(found)
        )

    async def _has_successor(self) -> bool:
        try:
            found = await self._get_slice()
        except StoreError:
            return False
        return bool(_addresses(found)) and not self._endpoint.matches_slice(found)

    async def _get_slice(self) -> Object:
        return await self._objects.get(
            ENDPOINT_SLICE, self._endpoint.name, namespace=self._endpoint.namespace
        )


def _addresses(found: Mapping[str, Any]) -> list[str]:
    return [address for endpoint in found.get("endpoints") or () for address in endpoint["addresses"]]
