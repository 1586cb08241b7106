"""Report of `fulcrum plan`, as text and as a document: sizes, planned pools and KV transfers. Pure.

`plan` plans the engines and prints the report.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fulcrum_core.api import PDPool, PDService
from fulcrum_core.api.engine import Connector
from fulcrum_core.formatting import format_count
from fulcrum_core.kv_compatibility import can_transfer
from fulcrum_core.models import (
    MODEL_UNKNOWN,
    KvPrecision,
    ModelFacts,
    format_gib,
    kv_bytes,
    kv_bytes_per_token,
    transfer_buffer_bytes,
    weight_bytes,
)
from fulcrum_core.values import Role
from fulcrum_operator.engines.launch import EnginePlan, LaunchEnvVar, Volume

ROLES = {"Prefill": (Role.PREFILL,), "Decode": (Role.DECODE,), "Flexible": (Role.PREFILL, Role.DECODE)}
"""Roles that the engines of a pool may have, by the pool's role."""


@dataclass(frozen=True, slots=True)
class PlannedPool:
    """Plan of one pool in one role; `role` is None if it is not fixed when an engine starts."""

    pool: PDPool
    role: Role | None
    plan: EnginePlan

    @property
    def title(self) -> str:
        """Name of the pool in the report."""
        return f"pool {self.pool.metadata.name}" + (f" as {self.role}" if self.role else "")

    @property
    def possible_roles(self) -> tuple[Role, ...]:
        """Roles that the pool's engines may have."""
        return (self.role,) if self.role else ROLES[self.pool.spec.role]


@dataclass(frozen=True, slots=True)
class PoolPair:
    """Whether engines of pool `prefill` can transfer KV to engines of pool `decode`."""

    prefill: str
    decode: str
    allowed: bool
    reason: str


def pool_pairs(planned: tuple[PlannedPool, ...]) -> tuple[PoolPair, ...]:
    """Return all pairs of pools between which KV may have to be transferred."""
    launched = [
        (p.title, p.possible_roles, p.plan.launch.identity.to_identity()) for p in planned if p.plan.launch
    ]
    return tuple(
        PoolPair(prefill, decode, verdict.allowed, verdict.reason)
        for prefill, prefill_roles, prefill_identity in launched
        for decode, decode_roles, decode_identity in launched
        if Role.PREFILL in prefill_roles and Role.DECODE in decode_roles
        for verdict in (can_transfer(prefill_identity, decode_identity),)
    )


@dataclass(frozen=True, slots=True)
class ServicePlan:
    """Plan of one service. `source` is where `facts` were read, or why they are missing."""

    service: PDService
    facts: ModelFacts | None
    source: str
    planned: tuple[PlannedPool, ...]

    @property
    def refused(self) -> bool:
        """Whether an engine cannot be started, or no pair of pools can transfer KV."""
        bad = any(p.plan.unsupported or p.plan.fit.status == "False" for p in self.planned)
        return bad or bool(self.planned and not any(pair.allowed for pair in pool_pairs(self.planned)))

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report for people."""
        yield f"service {self.service.metadata.name}, model {self.service.spec.model}"
        yield f"  {self.source}"
        yield from (f"  {name}: {value}" for name, value in self.sizes().items())
        for planned in self.planned:
            yield from _pool_lines(planned)
        pair_lines = (
            f"{p.prefill} → {p.decode}: {_yes_or_no(p.allowed)}, {p.reason}" for p in pool_pairs(self.planned)
        )
        yield from _section_lines("KV transfer", tuple(pair_lines))

    def sizes(self) -> dict[str, str]:
        """Return the sizes of the model by name; empty if its config.json was not read."""
        facts, source = self.facts, self.service.spec.model_source
        if facts is None:
            return {}
        tokens = (source.max_length if source else None) or facts.context_tokens
        per_token = kv_bytes_per_token(facts)
        transfer = self.service.spec.kv_transfer
        buffered = transfer is not None and transfer.connector is Connector.LMCACHE
        return {
            "shape": _format_shape(facts),
            "parameters": _format_parameters(facts),
            "weights": f"{format_gib(weight_bytes(facts))}, {facts.quantization or facts.dtype}",
            "KV": f"{per_token:,} bytes a token, {format_gib(kv_bytes(facts, tokens))} for {tokens:,} tokens",
            **({"transfer buffer": _format_transfer_buffers(facts, tokens)} if buffered else {}),
        }

    def document(self) -> dict[str, Any]:
        """Return the report for programs."""
        return {
            "service": self.service.metadata.name,
            "namespace": self.service.metadata.namespace,
            "model": self.service.spec.model,
            "source": self.source,
            "facts": _facts_document(self.facts),
            "pools": [_pool_document(planned) for planned in self.planned],
            "pairs": [asdict(pair) for pair in pool_pairs(self.planned)],
        }


def _format_transfer_buffers(facts: ModelFacts, tokens: int) -> str:
    sizes = {
        facts.dtype if kv is KvPrecision.AUTO else kv.value: format_gib(
            transfer_buffer_bytes(facts, tokens, kv)
        )
        for kv in KvPrecision
    }
    listed = ", ".join(f"{size} in {kv}" for kv, size in sizes.items())
    return f"{listed}, rounded up to multiples of 256 MiB"


def _yes_or_no(allowed: bool) -> str:
    return "yes" if allowed else "no"


def _format_parameters(facts: ModelFacts) -> str:
    size, unit = (1e9, "billion") if facts.params >= 1e8 else (1e6, "million")
    return f"{facts.params / size:.2f} {unit}, {facts.active_params / size:.2f} a token"


def _format_shape(facts: ModelFacts) -> str:
    windows = f", {facts.window_layers} of them with a window of {facts.window_tokens}"
    states = f", {facts.state_layers} of them with a state and no KV"
    experts = f", {facts.experts_per_token} of {facts.experts} experts a token"
    heads = f"{facts.attention_heads} heads, {facts.kv_heads} of KV of {facts.head_size} values"
    latent = f"{facts.attention_heads} heads, {facts.latent_size} latent values a token"
    return (
        f"{facts.architecture}, {format_count(facts.layers, 'layer')}"
        f"{windows if facts.window_layers else ''}{states if facts.state_layers else ''}, "
        f"{facts.attention_kind}: {latent if facts.latent else heads}{experts if facts.is_moe else ''}, "
        f"{facts.context_tokens:,} tokens"
    )


def _pool_lines(planned: PlannedPool) -> Iterator[str]:
    plan = planned.plan
    yield ""
    yield planned.title
    hint = "; pass --model-config" if plan.fit.reason == MODEL_UNKNOWN else ""
    yield f"  fits: {plan.fit.status}, {plan.fit.reason}: {plan.fit.message}{hint}"
    yield from (f"  refused: {refusal}" for refusal in plan.unsupported)
    width = max(len(f"{choice.name} {choice.value}") for choice in plan.choices)
    for choice in plan.choices:
        yield f"  {f'{choice.name} {choice.value}':{width}}  {choice.reason}"
    if plan.launch is not None:
        yield from _section_lines(
            "  command", (" ".join(_quote_for_shell(part) for part in plan.launch.command),)
        )
        variables = (f"{v.name}={_variable_value(v)}" for v in plan.launch.env)
        yield from _section_lines("  environment", tuple(variables))
        yield f"  ports: {', '.join(f'{port.name} {port.number}' for port in plan.launch.ports)}"
        yield f"  volumes: {', '.join(_format_volume(volume) for volume in plan.launch.volumes)}"


def _format_volume(volume: Volume) -> str:
    """Describe a volume: `shared-memory at /dev/shm (memory, 8.0 GiB)`."""
    size = "" if volume.size_bytes is None else f", {format_gib(volume.size_bytes)}"
    source = f" {volume.source}" if volume.source else ""
    return f"{volume.name} at {volume.mount} ({volume.kind}{source}{size})"


def _variable_value(variable: LaunchEnvVar) -> str:
    """The value, or where it comes from: `<status.podIP>`, `<secret hub, key token>`."""
    if variable.pod_field:
        return f"<{variable.pod_field}>"
    if variable.secret:
        return f"<secret {variable.secret}>"
    return variable.value if variable.source is None else f"<{variable.source}>"


def _quote_for_shell(part: str) -> str:
    """Quote an argument for a shell, so that Kubernetes' `$(POD_IP)` stays as it is."""
    return f"'{part}'" if any(mark in part for mark in ' "{$') else part


def _section_lines(title: str, lines: tuple[str, ...]) -> Iterator[str]:
    if lines:
        indent = " " * (len(title) - len(title.lstrip()) + 2)
        yield from ("", title) if indent == "  " else (title,)
        yield from (f"{indent}{line}" for line in lines)


def _facts_document(facts: ModelFacts | None) -> Mapping[str, Any] | None:
    if facts is None:
        return None
    return {
        **asdict(facts),
        "attention": facts.attention_kind,
        "params": facts.params,
        "weight_bytes": weight_bytes(facts),
        "kv_bytes_per_token": kv_bytes_per_token(facts),
    }


def _pool_document(planned: PlannedPool) -> dict[str, Any]:
    plan = planned.plan
    launch = plan.launch
    return {
        "pool": planned.pool.metadata.name,
        "role": planned.role.value if planned.role else None,
        "fit": asdict(plan.fit),
        "choices": [asdict(choice) for choice in plan.choices],
        "refusals": list(plan.unsupported),
        "command": list(launch.command) if launch else None,
        "env": {v.name: _variable_value(v) for v in launch.env} if launch else None,
        "ports": {port.name: port.number for port in launch.ports} if launch else None,
        "volumes": [asdict(volume) for volume in launch.volumes] if launch else None,
        "resources": asdict(launch.resources) if launch else None,
        "identity": launch.identity.dump() if launch else None,
        "strategy": launch.flip_strategy.value if launch else None,
    }
