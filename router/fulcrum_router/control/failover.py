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

from fulcrum_cluster.lease import ROUTER_TIMING, ClusterLease, Elector, StepDown
from fulcrum_cluster.objects import ENDPOINT_SLICE, Object, ObjectApi
from fulcrum_core.errors import Conflict, StoreError
from fulcrum_core.ports import Clock
from fulcrum_router.router import Router

log = structlog.get_logger()

HAND_OVER_S = 5.0
"""How long a router that was told to end goes on taking new requests at most."""
LINGER_S = 3.0
"""How long it does so after its successor has stepped in: until every node directs connections there."""
CHECK_S = 2.0
"""How often the active one looks whether the slice still says so."""
RETRY_S = 0.5
LOOK_S = 0.1
"""How often a leaving router looks for its successor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one router listens, and under which names that is kept."""

    name: str
    """Of the Lease and of the EndpointSlice."""
    namespace: str
    identity: str
    address: str
    port: int
    state_port: int

    def ports(self) -> list[dict[str, Any]]:
        """As the slice says it; the names are those of the Service's ports."""
        named = (("http", self.port), ("state", self.state_port))
        return [{"name": name, "port": port, "protocol": "TCP"} for name, port in named]

    def patch(self) -> dict[str, Any]:
        """What makes the slice direct all traffic here."""
        pod = {"kind": "Pod", "namespace": self.namespace, "name": self.identity}
        ready = {"ready": True, "serving": True, "terminating": False}
        endpoint = {"addresses": [self.address], "conditions": ready, "targetRef": pod}
        return {"endpoints": [endpoint], "ports": self.ports()}

    def is_in(self, found: Mapping[str, Any]) -> bool:
        """Whether the slice does so already."""
        ports = {(port.get("name"), port.get("port")) for port in found.get("ports") or ()}
        here = {(port["name"], port["port"]) for port in self.ports()}
        return _addresses(found) == [self.address] and ports == here


class Failover:
    """One router's part in it."""

    def __init__(
        self, router: Router, objects: ObjectApi, place: Place, *, clock: Clock, rng: random.Random
    ) -> None:
        self._router, self._objects, self._place, self._clock = router, objects, place, clock
        self._elector = Elector(
            ClusterLease(objects, place.name, namespace=place.namespace),
            identity=place.identity,
            timing=ROUTER_TIMING,
            step_down=StepDown.WHEN_REPLACED,
            clock=clock,
            rng=rng,
            on_change=self._changed,
        )
        self._turned = asyncio.Event()
        self._last_active_s = -HAND_OVER_S
        self._written = True
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
                    tasks.create_task(self._keep_slice())
            except Exception:
                log.exception("election begins anew after a fault of the router")
            await asyncio.sleep(RETRY_S)

    async def hand_over(self) -> None:
        """After `run`: let another one take over, serving on until clients are directed there.

        Returns after `HAND_OVER_S` at the latest, also where no other one is left.
        """
        end_s = self._clock.monotonic_s() + HAND_OVER_S
        if self._elector.leading:
            await self._elector.release()
        elif self._clock.monotonic_s() - self._last_active_s > HAND_OVER_S:
            return
        while self._clock.monotonic_s() < end_s and not await self._is_replaced():
            await asyncio.sleep(LOOK_S)
        self._router.leaving = True
        await asyncio.sleep(max(0.0, min(LINGER_S, end_s - self._clock.monotonic_s())))

    def _changed(self, leads: bool) -> None:
        if leads:
            self._router.step_in()
        else:
            self._router.active = False
            self._last_active_s = self._clock.monotonic_s()
        self._turned.set()

    async def _keep_slice(self) -> None:
        while True:
            self._turned.clear()
            pause_s = CHECK_S
            if self._elector.leading and not await self._direct_here():
                pause_s = RETRY_S
            try:
                async with asyncio.timeout(pause_s):
                    await self._turned.wait()
            except TimeoutError:
                continue

    async def _direct_here(self) -> bool:
        """Whether the slice directs traffic here now."""
        try:
            found = await self._find()
            if not self._place.is_in(found):
                if _addresses(found):
                    await self._elector.attempt()  # is it another active one's by now?
                if not self._elector.leading:
                    return True
                await self._write(found)
        except Conflict:
            return False
        except StoreError as error:
            if self._written:
                log.warning("endpoint not written", slice=self._place.name, reason=str(error))
            self._written = False
            return False
        self._written = True
        return True

    async def _write(self, found: Object) -> None:
        place = self._place
        await self._objects.patch(
            ENDPOINT_SLICE,
            place.name,
            place.patch(),
            namespace=place.namespace,
            resource_version=found["metadata"]["resourceVersion"],
        )
        log.info("traffic directed here", slice=place.name, address=place.address, before=_addresses(found))

    async def _is_replaced(self) -> bool:
        try:
            found = await self._find()
        except StoreError:
            return False
        return bool(_addresses(found)) and not self._place.is_in(found)

    async def _find(self) -> Object:
        return await self._objects.get(ENDPOINT_SLICE, self._place.name, namespace=self._place.namespace)


def _addresses(found: Mapping[str, Any]) -> list[str]:
    return [address for endpoint in found.get("endpoints") or () for address in endpoint["addresses"]]
