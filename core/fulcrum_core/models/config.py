"""Parse a model's config.json of Hugging Face into `ModelFacts`, for memory sizes and engine settings.

Model families name the same fact differently, and some facts follow from others. Only the keys that sizes and
settings need are read. A required key that is missing and cannot be derived is an error that names it. Files
are read by the callers.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from fulcrum_core.errors import InvalidInput
from fulcrum_core.models.facts import ModelFacts
from fulcrum_core.models.parameter_count import count_params

_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16", "half": "float16"}
_QUANTIZED_BITS = {"fp8": 8.0, "fbgemm_fp8": 8.0, "mxfp4": 4.25, "modelopt_fp4": 4.5, "nvfp4": 4.5}
_FULL_ATTENTION = frozenset({"full_attention", "attention", "global_attention"})
_WINDOWED_ATTENTION = frozenset(
    {"sliding_attention", "sliding_window", "local_attention", "chunked_attention"}
)
_NUMBER_MAX = 10**16
"""Upper bound of every number in a config; larger numbers are refused."""
_GEMMA = {"tie_word_embeddings": True, "max_position_embeddings": 8192}
_FAMILY_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma": {**_GEMMA, "vocab_size": 256000},
    "gemma2": {**_GEMMA, "vocab_size": 256000, "sliding_window_pattern": 2},
    "gemma3_text": {
        **_GEMMA,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "sliding_window_pattern": 6,
    },
    "cohere2": {"tie_word_embeddings": True, "sliding_window_pattern": 4},
}
"""Keys that a family omits from its files. `sliding_window_pattern` n: each n-th layer has full attention."""


def parse_model_config(config: Mapping[str, Any], *, source: str = "config.json") -> ModelFacts:
    """Return the facts of the model that a config.json describes.

    Args:
        config: Content of config.json. Of a multimodal model only the text part is read.
        source: Name of the file in errors.

    Raises:
        InvalidInput: if the file does not describe a decoder with attention.
    """
    try:
        facts = _read_facts(config, source)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise InvalidInput(source, f"{type(error).__name__}: {error}", "describes no model") from error
    _check_sizes(facts, source)
    return facts


def _read_facts(config: Mapping[str, Any], source: str) -> ModelFacts:
    outer, text = config, _find_text_config(config)
    reader = _NumberReader(text, source)
    layers = reader.required_count("num_hidden_layers", "n_layer")
    heads = reader.required_count("num_attention_heads", "n_head")
    hidden = reader.required_count("hidden_size", "n_embd")
    latent = (
        reader.optional_number("kv_lora_rank") + reader.optional_number("qk_rope_head_dim")
        if "kv_lora_rank" in text
        else 0
    )
    full, windowed, state = _count_layer_kinds(text, layers)
    if not full + windowed:
        raise InvalidInput(source, "no attention layer", "must describe a model with a KV cache")
    window = reader.optional_number("sliding_window") if windowed else 0
    head_size = reader.optional_number("head_dim") or hidden // heads
    kv_heads = (
        1 if latent else (reader.optional_number("num_key_value_heads", "multi_query_group_num") or heads)
    )
    if heads % kv_heads:
        raise InvalidInput(source, f"{heads} attention heads, {kv_heads} KV heads", "must divide evenly")
    dtype = _read_dtype(outer, text, source)
    quantization, bits = _read_quantization(outer, text, dtype)
    params = count_params(
        text, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head_size=head_size
    )
    return ModelFacts(
        architecture=_read_architecture(outer, source),
        layers=layers,
        kv_layers=full,
        window_layers=windowed,
        window_tokens=window,
        state_layers=state,
        attention_heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        latent_size=latent,
        index_bytes=reader.optional_number("index_head_dim") + 4 if "index_head_dim" in text else 0,
        hidden_size=hidden,
        experts=params.experts,
        experts_per_token=params.experts_per_token,
        context_tokens=reader.required_count("max_position_embeddings", "n_positions", "max_sequence_length"),
        dtype=dtype,
        quantization=quantization,
        weight_bits=bits,
        embedding_params=params.embedding,
        linear_params=params.linear,
        expert_params=params.expert,
        active_params=params.active,
    )


def _check_sizes(facts: ModelFacts, source: str) -> None:
    """Refuse numbers outside their range: with them, sizes would divide by zero or be unbounded."""
    needed = ("latent_size" if facts.latent else "head_size", "weight_bits", "active_params")
    for name in (field.name for field in fields(facts)):
        value = getattr(facts, name)
        if isinstance(value, str):
            continue
        if not 0 <= value <= _NUMBER_MAX or (not value and name in needed):
            shown = "out of range" if value else 0
            raise InvalidInput(
                f"{source}: {name.replace('_', ' ')}",
                shown,
                f"must be positive and at most {_NUMBER_MAX:.0e}",
            )


class _NumberReader:
    """Reads whole numbers from a config in which a number may have one of several names."""

    def __init__(self, text: Mapping[str, Any], source: str) -> None:
        self._text, self._source = text, source

    def optional_number(self, *names: str) -> int:
        """Return the number under the first of these names that is set; 0 if none is."""
        for name in names:
            value = self._text.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InvalidInput(f"{self._source}: {name}", value, "must be a whole number")
            return value
        return 0

    def required_count(self, *names: str) -> int:
        """Return the number under the first of these names that is set; refuse it if it is 0 or missing."""
        value = self.optional_number(*names)
        if not value:
            raise InvalidInput(f"{self._source}: {names[0]}", "missing", "must be a positive whole number")
        return value


def _find_text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = (config.get(name) for name in ("text_config", "llm_config", "language_config"))
    text = next((part for part in nested if isinstance(part, Mapping)), config)
    return {**_FAMILY_DEFAULTS.get(str(text.get("model_type")), {}), **text}


def _read_architecture(config: Mapping[str, Any], source: str) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise InvalidInput(f"{source}: architectures", names or "missing", "must name the model's class")
    return names[0]


def _count_layer_kinds(text: Mapping[str, Any], layers: int) -> tuple[int, int, int]:
    """Count the layers that keep KV of all tokens, KV of a window of tokens, and a state instead of KV."""
    kinds = text.get("layer_types")
    if isinstance(kinds, list) and kinds:
        full = sum(kind in _FULL_ATTENTION for kind in kinds)
        windowed = sum(kind in _WINDOWED_ATTENTION for kind in kinds)
        return full, windowed, len(kinds) - full - windowed
    every = text.get("full_attention_interval")
    if isinstance(every, int) and every > 0:
        return layers // every, 0, layers - layers // every
    if not _has_window(text):
        return layers, 0, 0
    pattern = text.get("sliding_window_pattern")
    full = layers // pattern if isinstance(pattern, int) and pattern else 0
    return full, layers - full, 0


def _has_window(text: Mapping[str, Any]) -> bool:
    return bool(text.get("sliding_window")) and text.get("use_sliding_window", True) is not False


def _read_dtype(outer: Mapping[str, Any], text: Mapping[str, Any], source: str) -> str:
    """Return the data type that the file names, or bfloat16 if it names none."""
    named = (part[key] for part in (text, outer) for key in ("dtype", "torch_dtype") if part.get(key))
    name = next(named, "bfloat16")
    known = _DTYPES.get(str(name).removeprefix("torch."))
    if known is None:
        raise InvalidInput(f"{source}: dtype", name, f"must be one of {', '.join(_DTYPES)}")
    return known


def _read_quantization(outer: Mapping[str, Any], text: Mapping[str, Any], dtype: str) -> tuple[str, float]:
    """Return the quantisation method of the checkpoint ("": none) and the bits per linear weight."""
    plain = 32.0 if dtype == "float32" else 16.0
    spec = outer.get("quantization_config") or text.get("quantization_config")
    if not isinstance(spec, Mapping):
        return "", plain
    method = str(spec.get("quant_method", "unknown")).lower()
    if method in _QUANTIZED_BITS:
        return method, _QUANTIZED_BITS[method]
    if isinstance(bits := spec.get("bits"), int):
        return method, bits + 0.5  # a scale and a zero point for each group of 128 or 32
    groups = spec.get("config_groups")
    if isinstance(groups, Mapping):
        sizes = [group["weights"]["num_bits"] for group in groups.values() if group.get("weights")]
        return method, float(max(sizes, default=plain))
    if "nvfp4" in str(spec.get("quant_algo", "")).lower():
        return method, 4.5
    return method, 8.0 if "fp8" in str(spec.get("quant_algo", "")).lower() else plain
