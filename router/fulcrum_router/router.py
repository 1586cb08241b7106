"""The router's common ground: what every request reads, and the few things it writes."""

import itertools
import os
import time

import structlog

from fulcrum_core.values import AutoscalingMode
from fulcrum_router.counters import Books
from fulcrum_router.fleet.instances import Fleet, Instance
from fulcrum_router.flip_requests import Epoch, FlipBoard
from fulcrum_router.http1.upstream import Failure, LegFailed
from fulcrum_router.policy import FlipRules, FlipWanted, PairMap, PredictionError, TokenRatio
from fulcrum_router.settings import Settings

log = structlog.get_logger()

_COUNTS_AGAINST_HEALTH = frozenset(Failure) - {Failure.HANDOFF, Failure.EJECTED, Failure.LEASE}
_NOBODY_THERE = frozenset({Failure.REFUSED, Failure.UNREACHABLE})


class Router:
    """One service's instances, settings and books."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.since_s = time.time()
        """When its ledger began."""
        self.settings = settings
        """None until the service was seen: the router is not ready then."""
        self.fleet = Fleet()
        self.books = Books()
        self.ratio = TokenRatio()
        self.prediction_error = PredictionError()
        self.pairs = PairMap()
        self.epoch = Epoch()
        self.flips = FlipBoard(self.epoch)
        self.rules = FlipRules()
        self.active = True
        """Whether clients are directed here; a standby answers those who come all the same."""
        self.leaving = False
        """Whether clients shall connect anew: another router has stepped in."""
        self.stopping = False
        self.stamp_s = self._looked_s = time.monotonic()
        """What is read now was not there to be read then, however long this process was not let run."""
        self._id_prefix = os.urandom(6).hex().encode()
        self._ids = itertools.count()

    def configure(self, settings: Settings, *, last_to_decode_s: float | None) -> None:
        """Serve by these settings; `last_to_decode_s` is when the P→D cooldown began."""
        self.settings = settings
        self.flips.wait_for_grant = settings.mode is AutoscalingMode.AUTO
        self.rules = FlipRules(
            enabled=settings.mode is not AutoscalingMode.OFF,
            shrink=settings.shrink,
            to_decode_after_s=0.0 if last_to_decode_s is None else last_to_decode_s + settings.cooldown_s,
        )

    def tick(self, now_s: float) -> None:
        """The event loop comes by, some ten times a second.

        The time of the last but one call is a stamp that is early rather than late: after a pause of the
        whole process what waited in the sockets is read before or after one call, never after two.
        """
        self.stamp_s, self._looked_s = self._looked_s, now_s

    def step_in(self) -> None:
        """Clients are directed here from now on. Of what another router has in flight nothing is known."""
        self.active = True
        self.since_s = time.time()
        self.books.takeovers += 1

    @property
    def ready(self) -> bool:
        """Whether a request would find an instance."""
        return not self.stopping and self.settings is not None and any(i.serving for i in self.fleet.all)

    def new_request_id(self) -> bytes:
        """An id that no other request of this process or its successor has."""
        return b"%b%x" % (self._id_prefix, next(self._ids))

    async def ask_for_flip(self, wanted: FlipWanted) -> None:
        """Tell the autoscaler, and give it a moment."""
        self.books.flips_wanted[wanted.role] += 1
        await self.flips.ask(wanted.role, wanted.reason)

    def leg_succeeded(self, instance: Instance, phase: str) -> None:
        """An instance answered."""
        self.books.legs[phase, "ok"] += 1
        if instance.health.failures and instance.health.succeeded():
            instance.refresh()

    def leg_failed(self, instance: Instance, phase: str, failed: LegFailed) -> None:
        """An instance did not answer, or not well: count it, and eject the instance when it is enough."""
        self.books.legs[phase, failed.failure] += 1
        if failed.failure not in _COUNTS_AGAINST_HEALTH:
            return
        at_once, hangs = failed.failure in _NOBODY_THERE, failed.failure is Failure.UNREACHABLE
        if instance.health.failed(time.monotonic(), at_once=at_once, hangs=hangs):
            self.ejected(instance, failed.failure)

    def distrust(self, instance: Instance, salt: str | None) -> None:
        """It may have fetched another prompt's KV and keep that under `salt`: use nothing of it any more."""
        if instance.salt != salt:
            return
        instance.salt = new_salt()
        instance.awaited.clear()
        self.books.caches_left += 1
        log.warning("prefix cache not used any more", instance=instance.name)

    def ejected(self, instance: Instance, reason: str) -> None:
        """No new work until a probe is answered."""
        instance.refresh()
        self.pairs.cool(instance.name)
        self.books.ejections[reason] += 1
        log.warning("instance ejected", instance=instance.name, reason=reason)


def new_salt() -> str:
    """Under which no engine holds any KV yet."""
    return os.urandom(6).hex()
