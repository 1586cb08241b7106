"""`fulcrum plan`: what a manifest would start, and why, before anything is applied.

It reads files and nothing else. What follows from the model needs its config.json; without it the rest is
said.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fulcrum_cli.local.engine_environment import find_local_model, read_model_config
from fulcrum_cli.manifest_files import read_manifest
from fulcrum_cli.option_values import parse_choice
from fulcrum_cli.terminal.output import OutputFormat, render_document
from fulcrum_core.api import PDPool, PDService
from fulcrum_core.errors import InvalidInput
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
from fulcrum_core.profiles import load_profile
from fulcrum_core.values import Role
from fulcrum_operator.engines.from_spec import build_launch_request
from fulcrum_operator.engines.launch import EnginePlan, Volume
from fulcrum_operator.engines.vllm import POD_PLACEMENT, plan_engine
from fulcrum_operator.plan.pools import desired_pools
from fulcrum_operator.plan.references import check_objects

_ROLES = {"Prefill": (Role.PREFILL,), "Decode": (Role.DECODE,), "Flexible": (Role.PREFILL, Role.DECODE)}


@dataclass(frozen=True, slots=True)
class PlannedPool:
    """One pool in one role; None where the role is not fixed at start."""

    pool: PDPool
    role: Role | None
    plan: EnginePlan

    @property
    def title(self) -> str:
        """As the report calls it."""
        return f"pool {self.pool.metadata.name}" + (f" as {self.role}" if self.role else "")

    @property
    def possible_roles(self) -> tuple[Role, ...]:
        """What its engines may have to do."""
        return (self.role,) if self.role else _ROLES[self.pool.spec.role]


def run(file: Path, *, model_config: Path | None, output: str | None) -> int:
    """Prints the plan of each service of the manifest. 1 where one cannot be started, 0 otherwise."""
    output_format = None if output is None else parse_choice("--output", output, OutputFormat)
    objects = read_manifest(file)
    check_objects(objects)
    services = [obj for obj in objects if isinstance(obj, PDService)]
    if not services:
        raise InvalidInput(str(file), "no PDService", "must have a service to plan")
    reports = [_ServicePlan.of(service, model_config) for service in services]
    if output_format is None:
        print("\n\n".join("\n".join(report.lines()) for report in reports))
    else:
        print(render_document({"services": [report.document() for report in reports]}, output_format))
    return 1 if any(report.refused for report in reports) else 0


def plan_service(service: PDService, facts: ModelFacts | None) -> tuple[PlannedPool, ...]:
    """Each pool, once for each role that its engines could be started in."""
    return tuple(
        PlannedPool(pool, role, _plan_pool_engine(service, pool, role, facts))
        for pool in desired_pools(service, ())
        for role in (_ROLES[pool.spec.role] if pool.spec.role_fixed_at_start else (None,))
    )


@dataclass(frozen=True, slots=True)
class PoolPair:
    """Whether engines of one pool could hand KV to those of another, or of their own."""

    source: str
    target: str
    allowed: bool
    reason: str


def pool_pairs(planned: tuple[PlannedPool, ...]) -> tuple[PoolPair, ...]:
    """Every way that KV may have to go, from who prefills to who decodes."""
    launched = [
        (p.title, p.possible_roles, p.plan.launch.identity.to_identity()) for p in planned if p.plan.launch
    ]
    return tuple(
        PoolPair(source, target, verdict.allowed, verdict.reason)
        for source, source_roles, source_identity in launched
        for target, target_roles, target_identity in launched
        if Role.PREFILL in source_roles and Role.DECODE in target_roles
        for verdict in (can_transfer(source_identity, target_identity),)
    )


def read_model_facts(service: PDService, model_config: Path | None) -> tuple[ModelFacts | None, str]:
    """The model's facts and where they were read, or None and why they were not.

    Raises:
        InvalidInput: for a file that was named and cannot be read, and for one that describes no model.
    """
    path = model_config or _find_model_config(service)
    if path is None:
        return None, "config.json not found: --model-config names it; what follows from the model is left out"
    path = path / "config.json" if path.is_dir() else path
    return read_model_config(path), str(path)


def _find_model_config(service: PDService) -> Path | None:
    """The folder on this machine that the manifest names, if it is there, or the model beside its engines."""
    source = service.spec.model_source
    named = Path(source.host_path, source.path) if source and source.host_path else Path(service.spec.model)
    path = named / "config.json"
    return path if path.is_file() else _find_local_model(service.spec.model)


def _find_local_model(model: str) -> Path | None:
    """The model that a local run would find by this name."""
    try:
        return None if "/" in model else find_local_model(model)
    except InvalidInput:
        return None


def _plan_pool_engine(
    service: PDService, pool: PDPool, role: Role | None, facts: ModelFacts | None
) -> EnginePlan:
    request = build_launch_request(service, pool.spec, pool_role=pool.spec.role, role=role, facts=facts)
    return plan_engine(request, POD_PLACEMENT)


@dataclass(frozen=True, slots=True)
class _ServicePlan:
    """One service, planned."""

    service: PDService
    facts: ModelFacts | None
    source: str
    planned: tuple[PlannedPool, ...]

    @classmethod
    def of(cls, service: PDService, model_config: Path | None) -> "_ServicePlan":
        if service.spec.engine.type == "Simulated":
            load_profile(service.spec.engine.profile)
            return cls(service, None, "engine.type is Simulated: there is no model to fit", ())
        facts, source = read_model_facts(service, model_config)
        return cls(service, facts, source, plan_service(service, facts))

    @property
    def refused(self) -> bool:
        """Whether an engine cannot be started, or would find nobody to hand KV to."""
        bad = any(p.plan.unsupported or p.plan.fit.status == "False" for p in self.planned)
        return bad or bool(self.planned and not any(pair.allowed for pair in pool_pairs(self.planned)))

    def lines(self) -> Iterator[str]:
        yield f"service {self.service.metadata.name}, model {self.service.spec.model}"
        yield f"  {self.source}"
        yield from (f"  {name}: {value}" for name, value in self.sizes().items())
        for planned in self.planned:
            yield from _pool_lines(planned)
        pair_lines = (
            f"{p.source} → {p.target}: {_yes_or_no(p.allowed)}, {p.reason}" for p in pool_pairs(self.planned)
        )
        yield from _section_lines("KV may go", tuple(pair_lines))

    def sizes(self) -> dict[str, str]:
        """The model in words; empty where it was not read."""
        facts, source = self.facts, self.service.spec.model_source
        if facts is None:
            return {}
        tokens = (source.max_length if source else None) or facts.context_tokens
        per_token = kv_bytes_per_token(facts)
        return {
            "shape": _format_shape(facts),
            "parameters": _format_parameters(facts),
            "weights": f"{format_gib(weight_bytes(facts))}, {facts.quantization or facts.dtype}",
            "KV": f"{per_token:,} bytes a token, {format_gib(kv_bytes(facts, tokens))} for {tokens:,} tokens",
            "transfer buffer": _format_transfer_buffers(facts, tokens),
        }

    def document(self) -> dict[str, Any]:
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
    return f"{listed}, in pieces of 256 MiB, where a connector has one"


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
    hint = "; --model-config names it" if plan.fit.reason == MODEL_UNKNOWN else ""
    yield f"  fits: {plan.fit.status}, {plan.fit.reason}: {plan.fit.message}{hint}"
    yield from (f"  refused: {refusal}" for refusal in plan.unsupported)
    width = max(len(f"{choice.name} {choice.value}") for choice in plan.choices)
    for choice in plan.choices:
        yield f"  {f'{choice.name} {choice.value}':{width}}  {choice.reason}"
    if plan.launch is not None:
        yield from _section_lines(
            "  command", (" ".join(_quote_for_shell(part) for part in plan.launch.command),)
        )
        variables = (
            f"{v.name}={v.value or _variable_source(v.pod_field, v.secret)}" for v in plan.launch.env
        )
        yield from _section_lines("  environment", tuple(variables))
        yield f"  ports: {', '.join(f'{port.name} {port.number}' for port in plan.launch.ports)}"
        yield f"  volumes: {', '.join(_format_volume(volume) for volume in plan.launch.volumes)}"


def _format_volume(volume: Volume) -> str:
    """What a pod is given, as `shared-memory at /dev/shm (memory, 8.0 GiB)`."""
    size = "" if volume.size_bytes is None else f", {format_gib(volume.size_bytes)}"
    source = f" {volume.source}" if volume.source else ""
    return f"{volume.name} at {volume.mount} ({volume.kind}{source}{size})"


def _variable_source(field: str, secret: str) -> str:
    return f"<{field}>" if field else f"<secret {secret}>"


def _quote_for_shell(part: str) -> str:
    """For a shell; `$(POD_IP)` is Kubernetes' to put in."""
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
        "env": {v.name: v.value or _variable_source(v.pod_field, v.secret) for v in launch.env}
        if launch
        else None,
        "ports": {port.name: port.number for port in launch.ports} if launch else None,
        "volumes": [asdict(volume) for volume in launch.volumes] if launch else None,
        "identity": launch.identity.dump() if launch else None,
        "strategy": launch.flip_strategy.value if launch else None,
    }
