"""Builders for the instances that dispatch chooses from, for requests, and for the leg of a response."""

from collections.abc import Iterable
from typing import Any

from fulcrum_core.latency import DecodeModel, PrefillModel
from fulcrum_core.values import EngineIdentity, Role, Slo
from fulcrum_router.data_path.continuation import Continuation
from fulcrum_router.fleet.instances import Instance
from fulcrum_router.policy import Candidates, InstanceRecord, Work
from fulcrum_router.policy.tiers.token_account import TokenAccount, Tokens

SLO = Slo(ttft_s=1.0, tpot_s=0.05)
PREFILL = PrefillModel(c0=0.0, c1=1e-3, c2=0.0)
"""1,000 tokens per second: 100 tokens take 0.1 s."""
DECODE = DecodeModel(intercept=0.01, slope=1e-5)
"""Largest batch at 50 ms: MT = 4,000 tokens."""
IDENTITY = EngineIdentity("m", "v 1", "bf16", 16, 1)
OTHER_MODEL = EngineIdentity("other", "v 1", "bf16", 16, 1)


class FakeFleet:
    """A fleet by `policy.journey.FleetView`."""

    def __init__(self, instances: Iterable[InstanceRecord]) -> None:
        self.instances = tuple(sorted(instances, key=lambda i: i.name))

    @property
    def candidates(self) -> Candidates[InstanceRecord]:
        """Anew at each call: tests change the instances."""
        return Candidates(self.instances)

    def __getitem__(self, name: str) -> InstanceRecord:
        return next(i for i in self.instances if i.name == name)


def instance(
    name: str,
    *,
    role: Role | None = None,
    queued_s: float = 0.0,
    decoding: int = 0,
    prefilling: int = 0,
    reserved: int = 0,
    error_share: float = 0.0,
    serving: bool = True,
    identity: EngineIdentity | None = IDENTITY,
    itl_s: float | None = None,
    prefill: PrefillModel = PREFILL,
    decode: DecodeModel = DECODE,
) -> InstanceRecord:
    """Make an instance with work in flight; without `role`, names with `p…` prefill and others decode."""
    role = role or (Role.PREFILL if name.startswith("p") else Role.DECODE)
    view = InstanceRecord(name, prefill, decode)
    view.role, view.serving = role, serving
    view.identity, view.itl_s, view.error_share = identity, itl_s, error_share
    if queued_s or prefilling:
        view.ledger.add_prefill(tokens=prefilling, predicted_s=queued_s, now_s=0.0)
    if decoding:
        view.ledger.add_decode(tokens=decoding)
    if reserved:
        view.ledger.reserve(tokens=reserved)
    return view


def work(tokens: int, **fields: Any) -> Work:
    """Make a request for a prompt of `tokens` that arrived at 0 s."""
    return Work(tokens, SLO, deadline_s=SLO.ttft_s, **fields)


def open_account(prompt_tokens: int, *, output_tokens: int = 0) -> TokenAccount:
    """Open the account of a request that is sent now."""
    account = TokenAccount(Tokens(prompt_tokens, output_tokens), output_max=1_000_000)
    account.send()
    return account


class FakeLeg:
    """The leg of a `DecodeResponse`: records what the response reports."""

    def __init__(self) -> None:
        self.first_bytes = self.lease_checks = 0
        self.continuation: Continuation | None = None
        self.max_response_s = 3_600.0

    def count_tokens(self, events: int) -> int:
        return events

    def record_first_byte(self, now_s: float) -> None:
        assert now_s
        self.first_bytes += 1

    def doubts_rejection(self) -> bool:
        return False

    def start_lease_check(self) -> None:
        self.lease_checks += 1

    def extend_deadline(self, now_s: float) -> float:
        return now_s


def make_serving(name: str, role: Role, *, pool: str = "") -> Instance:
    """Make an instance of the router's fleet that serves; nobody listens at its endpoint."""
    made = Instance(name, pool=pool)
    made.assign(role)
    made.set_endpoint("127.0.0.1", 9)
    return made


class FakeDownstream:
    """A client's connection that records what is written."""

    def __init__(self) -> None:
        self.paused = False
        self.writes: list[bytes] = []
        self.finished_keep_alive: bool | None = None

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    def release_body(self) -> None:
        pass

    def finish_response(self, *, keep_alive: bool) -> None:
        self.finished_keep_alive = keep_alive
