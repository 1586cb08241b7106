"""Engine profiles: step duration, memory and links of one model on one hardware, for simulated engines.

Simulated engines and simulations run with a profile. The router predicts with it until it has measured the
engine; the operator and `fulcrum` read start-up time and identity from it.

A profile is a YAML file: a shipped one (`PROFILE_NAMES`) or a user's own. The loader refuses a coefficient
below its physical limit: `t0` is at least the time to read the weights, `b` that of one token's arithmetic,
`d2` that to read one token's KV. Coefficients fitted to end-to-end runs often break these limits unnoticed.
"""

from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fulcrum_core.errors import InvalidInput
from fulcrum_core.latency import StepModel
from fulcrum_core.validation_rules import describe_rule, shorten_value
from fulcrum_core.yaml_loader import load_documents

_DATA = resources.files("fulcrum_core") / "data" / "profiles"
PROFILE_NAMES = tuple(sorted(entry.name.removesuffix(".yaml") for entry in _DATA.iterdir()))

UNKNOWN_PROFILE = f"is not one of {', '.join(PROFILE_NAMES)}, nor a .yaml file"

Positive = Annotated[float, Field(gt=0, le=1e24, allow_inf_nan=False)]
Duration = Annotated[float, Field(ge=0, le=86400, allow_inf_nan=False)]
Coefficient = Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)]
PositiveCoefficient = Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False)]
Count = Annotated[int, Field(gt=0, le=10**18)]
StepCount = Annotated[int, Field(gt=0, le=10**7)]
TokenCount = Annotated[int, Field(gt=0, le=10**9)]

STEP_MAX_S = 3600.0
"""Longest step: one with the whole token budget, as many requests as may run and a full KV cache."""
BLOCKS_MAX = 10_000_000
"""Most KV blocks; a simulated engine keeps a list of the free ones."""


class EngineProfile(BaseModel):
    """Profile of one kind of engine instance. Peak FLOP/s and memory bandwidth are those of one GPU."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1, max_length=253)
    description: str = Field(
        min_length=1, description="Model and hardware of the profile, and the source of its numbers."
    )
    t0: PositiveCoefficient = Field(description="Fixed duration of a step, seconds.")
    b: PositiveCoefficient = Field(description="Step duration per prefill token, seconds.")
    c: Coefficient = Field(description="Step duration per squared prefill token (attention), seconds.")
    d1: Coefficient = Field(description="Step duration per decoding request, seconds.")
    d2: PositiveCoefficient = Field(description="Step duration per token of decode context, seconds.")
    mixed_factor: Annotated[float, Field(ge=1, le=1000, allow_inf_nan=False)] = Field(
        default=1.1, description="Factor by which prefill is slower in a step that also decodes."
    )
    fetch_start_s: Coefficient = Field(
        default=0.0, description="Step duration per KV fetch that starts in it, of at most max_seqs, seconds."
    )
    kv_capacity_tokens: TokenCount = Field(description="KV cache of the instance, tokens.")
    block_size: TokenCount = Field(description="Tokens per KV block.")
    token_budget: StepCount = Field(description="Maximum tokens in a step (max_num_batched_tokens).")
    max_seqs: StepCount = Field(description="Maximum running requests (max_num_seqs).")
    kv_bytes_per_token: Count = Field(description="KV cache size of one token over all layers, bytes.")
    params: Count = Field(description="Number of the model's parameters.")
    weight_bytes: Count = Field(description="Size of the model's weights, bytes.")
    tensor_parallel: Count = Field(description="GPUs per instance.")
    peak_flops: Positive = Field(description="Peak performance of one GPU, FLOP/s.")
    hbm_bytes_per_s: Positive = Field(description="Memory bandwidth of one GPU, bytes/s.")
    link_bytes_per_s: Positive = Field(
        description="Bandwidth of a KV transfer between two instances, bytes/s."
    )
    link_setup_s: Duration = Field(description="Fixed duration of a KV transfer, seconds.")
    handshake_s: Duration = Field(description="Duration of the first contact between two instances, seconds.")
    startup_s: Duration = Field(description="Time from process start to ready, seconds.")

    @property
    def step_model(self) -> StepModel:
        """Model of the duration of one engine step."""
        return StepModel(self.t0, self.b, self.c, self.d1, self.d2, self.mixed_factor)

    @property
    def kv_blocks(self) -> int:
        """Number of whole blocks in the KV cache."""
        return self.kv_capacity_tokens // self.block_size


def load_profile(name_or_path: str) -> EngineProfile:
    """Return the shipped profile of that name, or the profile in that YAML file.

    A text with a slash or the ending `.yaml` or `.yml` is a path. In a cluster the operator
    uses `load_shipped_profile`: a path in a user's manifest would make it read its own container's files.

    Raises:
        InvalidInput: for an unknown name, a file that cannot be read, a field that is missing, unknown or out
            of range, or a coefficient below its physical limit.
    """
    if is_profile_path(name_or_path):
        return parse_profile(_read_file(name_or_path), source=name_or_path)
    if name_or_path not in PROFILE_NAMES:
        raise InvalidInput("profile", name_or_path, UNKNOWN_PROFILE)
    return load_shipped_profile(name_or_path)


def load_shipped_profile(name: str) -> EngineProfile:
    """Return the shipped profile of that name; no file of a user's is read.

    Raises:
        InvalidInput: for an unknown name.
    """
    if name not in PROFILE_NAMES:
        raise InvalidInput("profile", name, f"is not one of {', '.join(PROFILE_NAMES)}")
    return parse_profile((_DATA / f"{name}.yaml").read_text(encoding="utf-8"), source=name)


def is_profile_path(text: str) -> bool:
    """Whether the text is a path of a profile, and not the name of a shipped one."""
    return "/" in text or text.endswith((".yaml", ".yml"))


def parse_profile(text: str, *, source: str) -> EngineProfile:
    """Return the profile in a YAML text, checked against its physical limits; errors name `source`."""
    try:
        profile = EngineProfile.model_validate(_parse_mapping(text, source))
    except ValidationError as error:
        raise _first_invalid_field(error, source) from error
    _check_sizes(profile, source)
    _check_physical_limits(profile, source)
    return profile


def _read_file(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "is not UTF-8 text"
        raise InvalidInput("profile", path, f"cannot be read: {reason.lower()}") from error


def _parse_mapping(text: str, source: str) -> dict[str, Any]:
    try:
        documents = load_documents(text)
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise InvalidInput("profile", source, f"is not YAML: {problem}") from error
    content = documents[0] if len(documents) == 1 else None
    if not isinstance(content, dict):
        raise InvalidInput("profile", source, "is not a mapping of profile fields")
    for key, value in content.items():  # a list may be long, and through aliases longer than memory
        if isinstance(value, (dict, list, set, tuple)):
            raise InvalidInput(f"{source}.{_show(key)}", type(value).__name__, "is not text or a number")
    return content


def _show(value: object) -> str:
    """Return a value of the file on one short line."""
    try:
        return shorten_value(str(value))
    except ValueError:
        return "a number of thousands of digits"


def _first_invalid_field(error: ValidationError, source: str) -> InvalidInput:
    """Return pydantic's first error as path, value and rule."""
    first = error.errors()[0]
    path = ".".join([source, *map(_show, first["loc"])])
    match first["type"]:
        case "missing":
            return InvalidInput(path, "missing", "is required")
        case "extra_forbidden":
            return InvalidInput(path, _show(first["input"]), "is not a field of an engine profile")
        case _:
            return InvalidInput(path, _show(first["input"]), describe_rule(first))


def _check_sizes(profile: EngineProfile, source: str) -> None:
    if profile.max_seqs > profile.token_budget:
        rule = f"is greater than token_budget ({profile.token_budget}): a decode step would not fit"
        raise InvalidInput(f"{source}.max_seqs", profile.max_seqs, rule)
    if profile.kv_blocks == 0:
        rule = f"is less than block_size ({profile.block_size})"
        raise InvalidInput(f"{source}.kv_capacity_tokens", profile.kv_capacity_tokens, rule)
    if profile.kv_blocks > BLOCKS_MAX:
        rule = f"makes {profile.kv_blocks:,} blocks: the limit is {BLOCKS_MAX:,}"
        raise InvalidInput(f"{source}.kv_capacity_tokens", profile.kv_capacity_tokens, rule)
    longest_s = profile.mixed_factor * (
        profile.t0
        + profile.b * profile.token_budget
        + profile.c * profile.token_budget**2
        + (profile.d1 + profile.fetch_start_s) * profile.max_seqs
        + profile.d2 * profile.kv_capacity_tokens
    )
    if longest_s > STEP_MAX_S:
        raise InvalidInput(source, f"{longest_s:g} s", f"is its longest step: the limit is {STEP_MAX_S:g} s")


def _check_physical_limits(profile: EngineProfile, source: str) -> None:
    """Refuse a coefficient that is below what arithmetic or memory bandwidth allows."""
    flops = profile.tensor_parallel * profile.peak_flops
    bandwidth = profile.tensor_parallel * profile.hbm_bytes_per_s
    limits = (
        ("b", profile.b, 2 * profile.params / flops, "2*params/(tensor_parallel*peak_flops)"),
        (
            "d2",
            profile.d2,
            profile.kv_bytes_per_token / bandwidth,
            "kv_bytes_per_token/(tensor_parallel*hbm_bytes_per_s)",
        ),
        (
            "t0",
            profile.t0,
            profile.weight_bytes / bandwidth,
            "weight_bytes/(tensor_parallel*hbm_bytes_per_s)",
        ),
    )
    for field, value, limit, formula in limits:
        if value < limit:
            raise InvalidInput(
                f"{source}.{field}", value, f"is below its physical limit {limit:.3g} = {formula}"
            )
