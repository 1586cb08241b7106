"""Facts and sizes of models, compared with the numbers that their authors publish."""

import json
from typing import Any

import pytest

from fulcrum_core.errors import InvalidInput
from fulcrum_core.models import (
    KvPrecision,
    ModelFacts,
    WeightPrecision,
    kv_bytes,
    kv_bytes_per_token,
    parse_model_config,
    rank_kv_bytes_per_token,
    transfer_buffer_bytes,
    weight_bytes,
)
from tests.paths import MODELS

MIB, GIB = 2**20, 2**30


def config(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((MODELS / name / "config.json").read_text(encoding="utf-8"))
    return loaded


def facts(name: str) -> ModelFacts:
    return parse_model_config(config(name))


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("llama-2-7b", 6.74),
        ("llama-3.1-8b", 8.03),
        ("llama-3.1-70b", 70.55),
        ("qwen3-32b", 32.76),
        ("gemma-3-27b", 27.0),
        ("mixtral-8x7b", 46.7),
        ("qwen3-30b-a3b", 30.53),
        ("qwen3-next-80b-a3b", 79.7),
        ("gpt-oss-20b", 20.9),
        ("deepseek-v3", 671.03),
    ],
)
def test_params_match_published_numbers_within_one_percent(model: str, billions: float) -> None:
    assert facts(model).params / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(
    ("model", "billions"),
    [("mixtral-8x7b", 12.9), ("deepseek-v3", 37), ("qwen3-30b-a3b", 3.3), ("gpt-oss-20b", 3.6)],
)
def test_active_params_of_a_moe_model_match_published_numbers(model: str, billions: float) -> None:
    assert facts(model).active_params / 1e9 == pytest.approx(billions, rel=0.1)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        pytest.param("llama-2-7b", 524_288, id="keys for every head"),
        pytest.param("llama-3.1-8b", 131_072, id="8 of 32 heads"),
        pytest.param("llama-3.1-70b", 327_680, id="8 of 64 heads"),
        pytest.param("qwen3-32b", 262_144, id="head size from the file, not hidden / heads"),
        pytest.param("deepseek-v3", 70_272, id="61 latent vectors of 512 + 64 values"),
        pytest.param("qwen3-next-80b-a3b", 24_576, id="12 of 48 layers keep KV"),
        pytest.param("gemma-3-27b", 507_904, id="windowed layers count in full"),
        pytest.param("tiny-llama", 1_024, id="float32"),
    ],
)
def test_kv_bytes_per_token_match_the_attention_kind(model: str, expected: int) -> None:
    assert kv_bytes_per_token(facts(model)) == expected


def test_kv_bytes_per_token_by_precision() -> None:
    llama = facts("llama-3.1-8b")
    assert [kv_bytes_per_token(llama, kv) for kv in KvPrecision] == [131_072, 65_536, 36_864]


def test_sparse_attention_adds_index_bytes_at_each_precision() -> None:
    sparse = facts("deepseek-v3.2")
    assert [kv_bytes_per_token(sparse, kv) for kv in (KvPrecision.AUTO, KvPrecision.FP8)] == [
        61 * (576 * 2 + 132),
        61 * (656 + 132),
    ]


def test_a_window_bounds_the_kv_of_a_long_prompt() -> None:
    gemma = facts("gemma-3-27b")
    layer = 2 * 16 * 128 * 2
    assert kv_bytes(gemma, 10_000) == layer * (10 * 10_000 + 52 * 1_024)
    assert kv_bytes(gemma, 500) == layer * 62 * 500


@pytest.mark.parametrize(
    ("model", "tokens", "kv", "expected_mib"),
    [
        pytest.param("llama-3.1-8b", 2_048, KvPrecision.AUTO, 256, id="exactly 256 MiB"),
        pytest.param("llama-3.1-8b", 2_049, KvPrecision.AUTO, 512, id="one token more needs 256 MiB more"),
        pytest.param("llama-3.1-70b", 32_768, KvPrecision.AUTO, 10_240, id="32k of 70B"),
        pytest.param("llama-3.1-70b", 32_768, KvPrecision.FP8, 5_120, id="half of it in FP8"),
        pytest.param("llama-3.1-70b", 32_768, KvPrecision.FP4, 3_072, id="2,880 MiB in FP4 with its scales"),
        pytest.param("deepseek-v3", 32_768, KvPrecision.AUTO, 2_304, id="latent attention is small"),
        pytest.param("tiny-llama", 1, KvPrecision.AUTO, 256, id="at least 256 MiB"),
    ],
)
def test_transfer_buffer_is_rounded_up_to_256_mib(
    model: str, tokens: int, kv: KvPrecision, expected_mib: int
) -> None:
    assert transfer_buffer_bytes(facts(model), tokens, kv) == expected_mib * MIB


def test_ranks_split_kv_heads_and_copy_latent_vectors() -> None:
    def on(model: str, tensor: int, pipeline: int = 1) -> float:
        return rank_kv_bytes_per_token(facts(model), tensor=tensor, pipeline=pipeline, kv=KvPrecision.AUTO)

    assert on("llama-3.1-70b", 4) == 327_680 / 4
    assert on("llama-3.1-70b", 16) == 327_680 / 8
    assert on("llama-3.1-70b", 4, pipeline=2) == 327_680 / 8
    assert on("deepseek-v3", 8) == 70_272


@pytest.mark.parametrize(
    ("model", "weights", "format_gib"),
    [
        pytest.param("llama-3.1-70b", WeightPrecision.AUTO, 131.4, id="16 bits"),
        pytest.param("llama-3.1-70b", WeightPrecision.FP8, 67.7, id="8 bits, embeddings as they are"),
        pytest.param("llama-3.1-70b", WeightPrecision.FP4, 39.8, id="4 bits and their scales"),
        pytest.param("deepseek-v3", WeightPrecision.AUTO, 626.7, id="a checkpoint in FP8"),
        pytest.param("gpt-oss-20b", WeightPrecision.AUTO, 11.9, id="a checkpoint in MXFP4"),
    ],
)
def test_weight_bytes_follow_the_precision(model: str, weights: WeightPrecision, format_gib: float) -> None:
    assert weight_bytes(facts(model), weights) / GIB == pytest.approx(format_gib, abs=0.05)


def test_model_family_defaults_fill_missing_config_keys() -> None:
    gemma = facts("gemma-3-27b")
    assert (gemma.kv_layers, gemma.window_layers, gemma.window_tokens) == (10, 52, 1024)
    assert gemma.context_tokens == 131_072
    assert gemma.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        pytest.param({"quant_method": "awq", "bits": 4}, ("awq", 4.5), id="bits and their scales"),
        pytest.param(
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8}}}},
            ("compressed-tensors", 8.0),
            id="groups",
        ),
        pytest.param({"quant_method": "modelopt", "quant_algo": "NVFP4"}, ("modelopt", 4.5), id="algorithm"),
        pytest.param({"quant_method": "modelopt", "quant_algo": "FP8"}, ("modelopt", 8.0), id="FP8"),
        pytest.param({"quant_method": "new"}, ("new", 16.0), id="an unknown method counts 16 bits"),
    ],
)
def test_checkpoint_quantization_and_weight_bits_are_read(
    spec: dict[str, Any], expected: tuple[str, float]
) -> None:
    read = parse_model_config({**config("llama-3.1-8b"), "quantization_config": spec})
    assert (read.quantization, read.weight_bits) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            {"num_hidden_layers": None},
            "config.json: num_hidden_layers (missing) must be a positive whole number",
            id="no layers",
        ),
        pytest.param(
            {"num_attention_heads": "many"},
            "config.json: num_attention_heads (many) must be a whole number",
            id="not a number",
        ),
        pytest.param(
            {"num_key_value_heads": 5},
            "config.json (32 attention heads, 5 KV heads) must divide evenly",
            id="heads that do not divide",
        ),
        pytest.param(
            {"torch_dtype": "int4"},
            "config.json: dtype (int4) must be one of float32, bfloat16, float16, half",
            id="an unsupported data type",
        ),
        pytest.param(
            {"architectures": []},
            "config.json: architectures (missing) must name the model's class",
            id="no model class",
        ),
        pytest.param(
            {"layer_types": ["mamba"] * 32},
            "config.json (no attention layer) must describe a model with a KV cache",
            id="no KV cache",
        ),
        pytest.param(
            {"head_dim": 0, "hidden_size": 2},
            "config.json: head size (0) must be positive and at most 1e+16",
            id="heads of size 0",
        ),
        pytest.param(
            {"intermediate_size": "wide"},
            "config.json (ValueError: invalid literal for int() with base 10: 'wide') describes no model",
            id="a size that is not a number",
        ),
        pytest.param(
            {"max_position_embeddings": 10**400},
            "config.json: context tokens (out of range) must be positive and at most 1e+16",
            id="a context that is too long",
        ),
        pytest.param(
            {"quantization_config": {"config_groups": {"a": {"weights": {"num_bits": "nan"}}}}},
            "config.json: weight bits (out of range) must be positive and at most 1e+16",
            id="bits that are NaN",
        ),
    ],
)
def test_config_without_a_decoder_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        parse_model_config({**config("llama-3.1-8b"), **change})
    assert str(refused.value) == message
