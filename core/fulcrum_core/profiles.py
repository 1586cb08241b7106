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
from fulcrum_core.validation_rules import describe_rule

_DATA = resources.files("fulcrum_core") / "data" / "profiles"
PROFILE_NAMES = tuple(sorted(entry.name.removesuffix(".yaml") for entry in _DATA.iterdir()))

UNKNOWN_PROFILE = f"is not one of {', '.join(PROFILE_NAMES)}, nor a .yaml file"

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(gt=0)]


class EngineProfile(BaseModel):
    """Profile of one kind of engine instance. Peak FLOP/s and memory bandwidth are those of one GPU."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1)
    description: str = Field(
        min_length=1, description="Model and hardware of the profile, and the source of its numbers."
    )
    t0: Positive = Field(description="Fixed duration of a step, seconds.")
    b: Positive = Field(description="Step duration per prefill token, seconds.")
    c: NotNegative = Field(description="Step duration per squared prefill token (attention), seconds.")
    d1: NotNegative = Field(description="Step duration per decoding request, seconds.")
    d2: Positive = Field(description="Step duration per token of decode context, seconds.")
    mixed_factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] = Field(
        default=1.1, description="Factor by which prefill is slower in a step that also decodes."
    )
    kv_capacity_tokens: Count = Field(description="KV cache of the instance, tokens.")
    block_size: Count = Field(description="Tokens per KV block.")
    token_budget: Count = Field(description="Maximum tokens in a step (max_num_batched_tokens).")
    max_seqs: Count = Field(description="Maximum running requests (max_num_seqs).")
    kv_bytes_per_token: Count = Field(description="KV cache size of one token over all layers, bytes.")
    params: Count = Field(description="Number of the model's parameters.")
    weight_bytes: Count = Field(description="Size of the model's weights, bytes.")
    tensor_parallel: Count = Field(description="GPUs per instance.")
    peak_flops: Positive = Field(description="Peak performance of one GPU, FLOP/s.")
    hbm_bytes_per_s: Positive = Field(description="Memory bandwidth of one GPU, bytes/s.")
    link_bytes_per_s: Positive = Field(
        description="Bandwidth of a KV transfer between two instances, bytes/s."
    )
    link_setup_s: NotNegative = Field(description="Fixed duration of a KV transfer, seconds.")
    handshake_s: NotNegative = Field(
        description="Duration of the first contact between two instances, seconds."
    )
    startup_s: NotNegative = Field(description="Time from process start to ready, seconds.")

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
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise InvalidInput("profile", source, f"is not YAML: {problem}") from error
    if not isinstance(content, dict):
        raise InvalidInput("profile", source, "is not a mapping of profile fields")
    return content


def _first_invalid_field(error: ValidationError, source: str) -> InvalidInput:
    """Return pydantic's first error as path, value and rule."""
    first = error.errors()[0]
    path = ".".join([source, *map(str, first["loc"])])
    match first["type"]:
        case "missing":
            return InvalidInput(path, "missing", "is required")
        case "extra_forbidden":
            return InvalidInput(path, first["input"], "is not a field of an engine profile")
        case _:
            return InvalidInput(path, first["input"], describe_rule(first))


def _check_sizes(profile: EngineProfile, source: str) -> None:
    if profile.max_seqs > profile.token_budget:
        rule = f"is greater than token_budget ({profile.token_budget}): a decode step would not fit"
        raise InvalidInput(f"{source}.max_seqs", profile.max_seqs, rule)
    if profile.kv_blocks == 0:
        rule = f"is less than block_size ({profile.block_size})"
        raise InvalidInput(f"{source}.kv_capacity_tokens", profile.kv_capacity_tokens, rule)


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
