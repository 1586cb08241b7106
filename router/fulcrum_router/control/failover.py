"""Elect the active router of a service by a Lease, and direct the service's traffic to it.

The active router writes its address into the service's EndpointSlice; nothing else directs traffic. The slice
also holds what the router has learned of the engines' speed, which its successor starts from. The active
router stays active while the API server is unreachable, since no other router could replace it then. Two
active routers for a moment do no harm: both serve requests. `server` runs it where a router has a Lease; a
local run has one router and no election.
"""

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from fulcrum_cluster.leader_election import ROUTER_TIMING, KubernetesLease, LeaderElector, StepDown
from fulcrum_cluster.objects import ENDPOINT_SLICE, Object, ObjectApi
from fulcrum_core.errors import Conflict, NotFound, StoreError
from fulcrum_core.ports import Clock
from fulcrum_core.router_state import ROUTER_HANDOVER_TIMEOUT_S
from fulcrum_router.policy.predictions.learned_models import render_models
from fulcrum_router.router import Router

log = structlog.get_logger()

LINGER_S = 3.0
"""Seconds for which a router that hands over still serves new requests after the slice names its successor:
nodes direct connections to the successor with a delay."""
SLICE_CHECK_INTERVAL_S = 2.0
"""Seconds between two checks of the slice by the active router."""
MODELS_ANNOTATION = "fulcrum.dev/learned-models"
"""Annotation of the slice with the learned models, for the next active router."""
MODELS_INTERVAL_S = 60.0
"""Seconds between two writes of the learned models, at least: every node watches the slice."""
SLICE_RETRY_S = 0.5
"""Seconds between two attempts to write the slice."""
SUCCESSOR_POLL_S = 0.1
"""Seconds between two checks of the slice for a successor, during a handover."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterEndpoint:
    """Address of one router, and the objects that direct traffic to it."""

    lease_name: str
    """Name of the Lease, and of the EndpointSlice."""
    namespace: str
    identity: str
    """Name of this router's pod, which the Lease names as its holder."""
    address: str
    """IP address of this router's pod."""
    port: int
    state_port: int

    def slice_ports(self) -> list[dict[str, Any]]:
        """Ports of the EndpointSlice, named as in the Service."""
        named = (("http", self.port), ("state", self.state_port))
        return [{"name": name, "port": port, "protocol": "TCP"} for name, port in named]

    def slice_patch(self) -> dict[str, Any]:
        """Merge patch of the EndpointSlice that directs all traffic to this router."""
        pod = {"kind": "Pod", "namespace": self.namespace, "name": self.identity}
        ready = {"ready": True, "serving": True, "terminating": False}
        endpoint = {"addresses": [self.address], "conditions": ready, "targetRef": pod}
        return {"endpoints": [endpoint], "ports": self.slice_ports()}

    def matches_slice(self, found: Mapping[str, Any]) -> bool:
        """Whether an EndpointSlice directs all traffic to this router."""
        ports = {(port.get("name"), port.get("port")) for port in found.get("ports") or ()}
        here = {(port["name"], port["port"]) for port in self.slice_ports()}
        return _addresses(found) == [self.address] and ports == here


class Failover:
    """One router's part in the election: takes part, writes the slice while active, hands over at the end.

    Args:
        router: Router that becomes active; a standby until then.
        objects: Access to the Lease and the EndpointSlice.
        endpoint: Address of this router.
        clock: Clock that the Lease's times are compared with.
        rng: Spreads the attempts of several routers.
    """

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
            KubernetesLease(objects, endpoint.lease_name, namespace=endpoint.namespace),
            identity=endpoint.identity,
            timing=ROUTER_TIMING,
            step_down=StepDown.WHEN_REPLACED,
            clock=clock,
            rng=rng,
            on_change=self._on_leadership_change,
        )
        self._leadership_changed = asyncio.Event()
        self._last_active_s = float(-ROUTER_HANDOVER_TIMEOUT_S)
        self._failure_logged = False
        """Whether the current failure to direct traffic here was logged."""
        self._adopts_models = True
        """Whether the models of the router before are still to be read."""
        self._models_stored_at_s = clock.monotonic_s()
        router.active = False

    async def run(self) -> None:
        """Take part in the election, and direct traffic here while elected, until cancelled.

        After an internal error the election starts again. If `run` ended instead, this router would go on
        serving without being in the election, unnoticed.
        """
        while True:
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._elector.run())
                    tasks.create_task(self._reconcile_slice())
            except Exception:
                log.exception("election failed with an internal error; starting it again")
            await asyncio.sleep(SLICE_RETRY_S)

    async def hand_over(self) -> None:
        """Release the Lease, wait for a successor, then close client connections after their next response.

        Call it after `run` has ended. Returns after `ROUTER_HANDOVER_TIMEOUT_S` at the latest, with a
        successor or without; at once if this router was not active within that time.
        """
        end_s = self._clock.monotonic_s() + ROUTER_HANDOVER_TIMEOUT_S
        if self._elector.leading:
            await self._store_models_for_successor()
            await self._elector.release()
        elif self._clock.monotonic_s() - self._last_active_s > ROUTER_HANDOVER_TIMEOUT_S:
            return
        while self._clock.monotonic_s() < end_s and not await self._has_successor():
            await asyncio.sleep(SUCCESSOR_POLL_S)
        self._router.leaving = True
        await asyncio.sleep(max(0.0, min(LINGER_S, end_s - self._clock.monotonic_s())))

    def _on_leadership_change(self, leading: bool) -> None:
        if leading:
            self._adopts_models = True
            self._router.become_active()
        else:
            self._router.active = False
            self._last_active_s = self._clock.monotonic_s()
        self._leadership_changed.set()

    async def _reconcile_slice(self) -> None:
        while True:
            self._leadership_changed.clear()
            pause_s = SLICE_CHECK_INTERVAL_S
            if self._elector.leading and not await self.ensure_slice():
                pause_s = SLICE_RETRY_S
            try:
                async with asyncio.timeout(pause_s):
                    await self._leadership_changed.wait()
            except TimeoutError:
                continue

    async def ensure_slice(self) -> bool:
        """Direct the slice to this router if this router still leads; return whether nothing is left to do.

        False means that the slice must be checked again soon: another writer changed it meanwhile, or the API
        server failed. The leadership is checked again, since the Lease may have expired while the process was
        paused.
        """
        try:
            found = await self._get_slice()
            self._adopt_models(found)
            if self._endpoint.matches_slice(found):
                if self._clock.monotonic_s() - self._models_stored_at_s >= MODELS_INTERVAL_S:
                    await self._store_models(found)
            else:
                if _addresses(found):
                    # Another router's address: that router may be the active one by now, so check the Lease.
                    await self._elector.try_to_lead()
                if not self._elector.leading:
                    return True
                await self._patch_slice(found)
        except Conflict:
            return False
        except StoreError as error:
            if not self._failure_logged:
                log.warning(
                    "cannot direct traffic here; retrying", slice=self._endpoint.lease_name, reason=str(error)
                )
            self._failure_logged = True
            return False
        self._failure_logged = False
        return True

    async def _patch_slice(self, found: Object) -> None:
        endpoint = self._endpoint
        await self._objects.patch(
            ENDPOINT_SLICE,
            endpoint.lease_name,
            endpoint.slice_patch(),
            namespace=endpoint.namespace,
            resource_version=found["metadata"]["resourceVersion"],
        )
        log.info(
            "traffic directed here",
            slice=endpoint.lease_name,
            address=endpoint.address,
            before=_addresses(found),
        )

    def _adopt_models(self, found: Object) -> None:
        """Start from what the router before has learned, once."""
        if self._adopts_models:
            self._adopts_models = False
            annotations = found["metadata"].get("annotations") or {}
            self._router.adopt_models(annotations.get(MODELS_ANNOTATION, ""))

    async def _store_models(self, found: Object) -> None:
        """Write what was learned into the slice if it has changed."""
        self._models_stored_at_s = self._clock.monotonic_s()
        models = self._router.collect_models()
        if models is None:
            return
        await self._objects.patch(
            ENDPOINT_SLICE,
            self._endpoint.lease_name,
            {"metadata": {"annotations": {MODELS_ANNOTATION: render_models(models)}}},
            namespace=self._endpoint.namespace,
            resource_version=found["metadata"]["resourceVersion"],
        )
        self._router.learned_models = models

    async def _store_models_for_successor(self) -> None:
        try:
            await self._store_models(await self._get_slice())
        except StoreError as error:
            log.warning("learned models not handed over", reason=str(error))

    async def _has_successor(self) -> bool:
        """Whether a successor is active, or none will ever be because the service was deleted."""
        try:
            found = await self._get_slice()
        except NotFound:
            return True
        except StoreError:
            return False
        return bool(_addresses(found)) and not self._endpoint.matches_slice(found)

    async def _get_slice(self) -> Object:
        return await self._objects.get(
            ENDPOINT_SLICE, self._endpoint.lease_name, namespace=self._endpoint.namespace
        )


def _addresses(found: Mapping[str, Any]) -> list[str]:
    return [address for endpoint in found.get("endpoints") or () for address in endpoint["addresses"]]
