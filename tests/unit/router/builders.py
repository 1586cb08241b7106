"""Instances as dispatch sees them."""

from dataclasses import dataclass, field

from fulcrum_core.latency import DecodeModel, PrefillModel
from fulcrum_core.values import EngineIdentity, Role, Slo
from fulcrum_router.policy import Ledger

SLO = Slo(ttft_s=1.0, tpot_s=0.05)
PREFILL = PrefillModel(c0=0.0, c1=1e-3, c2=0.0)
"""A thousand tokens a second: 100 tokens take 0.1 s."""
DECODE = DecodeModel(intercept=0.01, slope=1e-5)
"""MT = 4,000 tokens at 50 ms."""
IDENTITY = EngineIdentity("m", "v 1", "bf16", 16, 1)
OTHER_MODEL = EngineIdentity("other", "v 1", "bf16", 16, 1)


@dataclass
class FakeInstance:
    """`policy.InstanceView`."""

    name: str
    role: Role
    serving: bool = True
    identity: EngineIdentity | None = IDENTITY
    ledger: Ledger = field(default_factory=Ledger)
    prefill_model: PrefillModel = PREFILL
    decode_model: DecodeModel = DECODE
    itl_s: float | None = None


def instance(
    name: str,
    *,
    role: Role | None = None,
    queued_s: float = 0.0,
    decoding: int = 0,
    prefilling: int = 0,
    serving: bool = True,
    identity: EngineIdentity | None = IDENTITY,
    itl_s: float | None = None,
) -> FakeInstance:
    """An instance with this much work; `p…` plays prefill, any other name decode, unless a role is given."""
    view = FakeInstance(
        name, role or (Role.PREFILL if name.startswith("p") else Role.DECODE), serving, identity
    )
    view.itl_s = itl_s
    if queued_s or prefilling:
        view.ledger.add_prefill(tokens=prefilling, seconds=queued_s)
    if decoding:
        view.ledger.add_decode(tokens=decoding)
    return view
