"""What the policies read of one instance.

A class, not a protocol: for each request dispatch reads some of these attributes of every instance, and
compiled code reads them several times as fast from a compiled class as through a protocol.
"""

from fulcrum_core.latency import DecodeModel, PrefillModel
from fulcrum_core.values import KV_LEASE_S, EngineIdentity, Role
from fulcrum_router.policy.ledger import Ledger


class InstanceRecord:
    """The state of one instance, its load, and the models that predict its latencies."""

    __slots__ = (
        "context_tokens",
        "decode_model",
        "engine_read_at_s",
        "engine_running",
        "engine_waiting",
        "error_share",
        "identity",
        "itl_s",
        "kv_capacity_tokens",
        "kv_lease_s",
        "kv_usage",
        "ledger",
        "max_seqs",
        "max_seqs_shown",
        "name",
        "on_cpu",
        "pool",
        "prefill_model",
        "role",
        "serving",
    )

    def __init__(self, name: str, prefill: PrefillModel, decode: DecodeModel) -> None:
        self.name = name
        """Name of the PDInstance."""
        self.pool = ""
        """Its pool: the instances of one have the same hardware."""
        self.role = Role.DECODE
        """Current role."""
        self.serving = False
        """Whether new requests may be sent to the instance."""
        self.on_cpu = False
        """Whether the engine runs on CPUs, without an accelerator."""
        self.identity: EngineIdentity | None = None
        """Engine properties that KV transfers depend on; None: unknown, treated as compatible."""
        self.ledger = Ledger()
        """Work that this router has in flight on the instance."""
        self.prefill_model = prefill
        """T(n): predicted prefill time of n tokens."""
        self.decode_model = decode
        """I(n): predicted inter-token latency with n tokens in the batch; MT is its inverse."""
        self.error_share = 0.0
        """Recent share of failed legs, 0 to 1."""
        self.itl_s: float | None = None
        """Mean inter-token latency over the last probe interval, in seconds; None: no tokens, or unknown."""
        self.kv_usage: float | None = None
        """Used fraction of the engine's KV cache; None: not reported."""
        self.kv_capacity_tokens: int | None = None
        """Tokens that the engine's KV cache holds; None: not reported."""
        self.engine_running: int | None = None
        """Requests that run in the engine, whoever sent them; None: not reported."""
        self.engine_waiting: int | None = None
        """Requests that wait in the engine for a place or for KV blocks; None: not reported. Those whose KV
        is on its way do not count if the engine tells them apart."""
        self.engine_read_at_s = 0.0
        """Unix time at which these counts were requested (simulated: time of the run)."""
        self.max_seqs: int | None = None
        """Requests that the engine decodes together, known or assumed by `batch_limit`; None: not known."""
        self.max_seqs_shown: int | None = None
        """The same, as full batches of its own pool have shown; None: not known, but perhaps assumed."""
        self.kv_lease_s = KV_LEASE_S
        """Time for which the engine keeps KV that is not fetched, in seconds; a start-up option."""
        self.context_tokens: int | None = None
        """Longest prompt and answer together that the engine takes, in tokens; None: not reported."""
