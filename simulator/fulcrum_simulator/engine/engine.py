"""The engine model. Public surface; the body follows."""

from collections.abc import Callable

from fulcrum_core.profiles import EngineProfile
from fulcrum_simulator.engine.events import Event, FetchStart, Finished, Step
from fulcrum_simulator.engine.requests import EngineRequest
from fulcrum_simulator.engine.stats import EngineStats, Gauges


class Engine:
    """One engine instance on the caller's clock.

    The caller's loop: `step = start_step(now)`, then `take_fetches()`; wait `step.duration_s`; `finish_step(now)`
    returns the events; again. With no step to run (None), wait for a submit, a fetch's end or `next_deadline_s`.
    """

    profile: EngineProfile
    engine_id: str
    stats: EngineStats

    def __init__(
        self,
        profile: EngineProfile,
        *,
        engine_id: str,
        lease_s: float = 30.0,
        step_noise: Callable[[], float] | None = None,
    ) -> None:
        """`engine_id` must be new at every start. `step_noise` gives a factor on each step's duration."""
        raise NotImplementedError

    @property
    def dead(self) -> bool:
        """Whether an assertion of the real engine failed: every further call raises EngineDead."""
        raise NotImplementedError

    @property
    def busy(self) -> bool:
        """Whether a step is under way."""
        raise NotImplementedError

    @property
    def heartbeat_interval_s(self) -> float:
        """How often this engine, as the taker of a hand-off, tells the giver that it still wants it: lease / 6."""
        raise NotImplementedError

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. InvalidInput if it could never fit the KV cache (a 400 of the real server) or its id is live."""
        raise NotImplementedError

    def abort(self, request_id: str, now_s: float) -> Finished | None:
        """End a request now and free what it holds; None if there is none of that id (already finished).

        May be called during a step: the request's token of that step is lost.
        """
        raise NotImplementedError

    def start_step(self, now_s: float) -> Step | None:
        """Schedule the next step; None if there is nothing to compute. EngineDead on malformed imports."""
        raise NotImplementedError

    def take_fetches(self) -> list[FetchStart]:
        """KV fetches that the scheduler accepted since last asked; ask after every start_step, also when it gave None."""
        raise NotImplementedError

    def finish_step(self, now_s: float) -> list[Event]:
        """End the step under way: Preempted of its scheduling first, then tokens, each Finished after its last token."""
        raise NotImplementedError

    def kv_fetch_done(self, request_id: str, digest: bytes, now_s: float) -> None:
        """The blocks arrived and hold the prompt with this digest (`held_digest` of what was read)."""
        raise NotImplementedError

    def kv_fetch_failed(self, request_id: str, now_s: float) -> None:
        """The pull failed: count it and compute the prompt here (kv_load_failure_policy=recompute)."""
        raise NotImplementedError

    def heartbeat(self, request_id: str, now_s: float) -> bool:
        """As the giver: extend a lease to at least now + 2/3 lease_s. False if it is gone."""
        raise NotImplementedError

    def notify_pulled(self, request_id: str, now_s: float) -> bool:
        """As the giver: the taker has read (or will not read) the blocks; free them. False and counted if it expired."""
        raise NotImplementedError

    def expire_leases(self, now_s: float) -> None:
        """Free the blocks of leases that ran out; every step does this too."""
        raise NotImplementedError

    def next_deadline_s(self) -> float | None:
        """When the next lease runs out; None without leases."""
        raise NotImplementedError

    def read_blocks(self, block_ids: tuple[int, ...]) -> tuple[bytes, ...]:
        """Per block the digest of the prompt whose KV it holds now, as a peer would read it; never checks a lease."""
        raise NotImplementedError

    def reset_prefix_cache(self) -> None:
        """Forget cached blocks that nothing holds."""
        raise NotImplementedError

    @property
    def gauges(self) -> Gauges:
        """What it holds now."""
        raise NotImplementedError
