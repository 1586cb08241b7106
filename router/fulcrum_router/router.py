"""The router's common ground: what every request reads, and the few things it writes."""

import itertools
import os
import time

import structlog

from fulcrum_core.values import AutoscalingMode
from fulcrum_router.counters import Counters
from fulcrum_router.fleet.instances import Fleet, Instance
from fulcrum_router.flip_requests import AppliedAssignment, FlipRequests
from fulcrum_router.http1.failures import Failure, LegFailed
from fulcrum_router.policy import (
    FlipProposal,
    FlipProposalRules,
    PredictionErrorMean,
    TokensPerByte,
    TransferPairs,
)
from fulcrum_router.settings import ServiceSettings

log = structlog.get_logger()

_COUNTS_AGAINST_HEALTH = frozenset(Failure) - {
    Failure.NO_KV_TRANSFER_PARAMS,
    Failure.EJECTED,
    Failure.LEASE_EXPIRED,
}
_EJECT_AT_ONCE = frozenset({Failure.REFUSED, Failure.UNREACHABLE})


class Router:
    """One service's instances, settings and counters."""

    def __init__(self, settings: ServiceSettings | None = None) -> None:
        self.since_s = time.time()
        """When its ledger began."""
        self.settings = settings
        """None until the service was seen: the router is not ready then."""
        self.fleet = Fleet()
        self.counters = Counters()
        self.tokens_per_byte = TokensPerByte()
        self.prediction_error = PredictionErrorMean()
        self.pairs = TransferPairs()
        self.applied_assignment = AppliedAssignment()
        self.flip_requests = FlipRequests(self.applied_assignment)
        self.flip_rules = FlipProposalRules()
        self.active = True
        """Whether clients are directed here; a standby answers those who come all the same."""
        self.leaving = False
        """Whether clients shall connect anew: another router has stepped in."""
        self.stopping = False
        self.received_after_s = self._last_tick_s = time.monotonic()
        """What is read now was not there to be read then, however long this process was not let run."""
        self._id_prefix = os.urandom(6).hex().encode()
        self._ids = itertools.count()

    def configure(self, settings: ServiceSettings, *, last_prefill_to_decode_s: float | None) -> None:
        """Serve by these settings; `last_prefill_to_decode_s` is when the P→D cooldown began."""
        self.settings = settings
        self.flip_requests.wait_for_flip = settings.autoscaling_mode is AutoscalingMode.AUTO
        self.flip_rules = FlipProposalRules(
            enabled=settings.autoscaling_mode is not AutoscalingMode.OFF,
            max_decode_load=settings.max_decode_load,
            to_decode_cooldown_until_s=0.0
            if last_prefill_to_decode_s is None
            else last_prefill_to_decode_s + settings.prefill_to_decode_cooldown_s,
        )

    def tick(self, now_s: float) -> None:
        """The event loop comes by, some ten times a second.

        The time of the last but one call is a stamp that is early rather than late: after a pause of the
        whole process what waited in the sockets is read before or after one call, never after two.
        """
        self.received_after_s, self._last_tick_s = self._last_tick_s, now_s

    def become_active(self) -> None:
        """Clients are directed here from now on. Of what another router has in flight nothing is known."""
        self.active = True
        self.since_s = time.time()
        self.counters.takeovers += 1

    @property
    def ready(self) -> bool:
        """Whether a request would find an instance."""
        return (
            not self.stopping and self.settings is not None and any(i.serving for i in self.fleet.instances)
        )

    def make_request_id(self) -> bytes:
        """An id that no other request of this process or its successor has."""
        return b"%b%x" % (self._id_prefix, next(self._ids))

    async def request_flip(self, proposal: FlipProposal) -> None:
        """Tell the autoscaler, and give it a moment."""
        self.counters.flip_requests[proposal.role] += 1
        await self.flip_requests.submit(proposal.role, proposal.reason)

    def record_leg_success(self, instance: Instance, phase: str) -> None:
        """An instance answered."""
        self.counters.legs[phase, "ok"] += 1
        if instance.health.failures and instance.health.record_success():
            instance.update_serving()

    def record_leg_failure(self, instance: Instance, phase: str, failed: LegFailed) -> None:
        """An instance did not answer, or not well: count it, and eject the instance when it is enough."""
        self.counters.legs[phase, failed.failure] += 1
        if failed.failure not in _COUNTS_AGAINST_HEALTH:
            return
        eject_now, unresponsive = failed.failure in _EJECT_AT_ONCE, failed.failure is Failure.UNREACHABLE
        if instance.health.record_failure(time.monotonic(), eject_now=eject_now, unresponsive=unresponsive):
            self.record_ejection(instance, failed.failure)

    def rotate_cache_salt(self, instance: Instance, cache_salt: str | None) -> None:
        """It may have fetched another prompt's KV and keep that under `cache_salt`: use nothing of it any
        more."""
        if instance.cache_salt != cache_salt:
            return
        instance.cache_salt = make_cache_salt()
        instance.incoming_transfers.clear()
        self.counters.cache_salt_rotations += 1
        log.warning("prefix cache not used any more", instance=instance.name)

    def record_ejection(self, instance: Instance, reason: str) -> None:
        """No new work until a probe is answered."""
        instance.update_serving()
        self.pairs.invalidate(instance.name)
        self.counters.ejections[reason] += 1
        log.warning("instance ejected", instance=instance.name, reason=reason)


def make_cache_salt() -> str:
    """Under which no engine holds any KV yet."""
    return os.urandom(6).hex()
