"""The excerpt of a config.json gives the same facts as the full file and fits a termination message."""

import json
from typing import Any

import pytest

from fulcrum_core.models import excerpt_config, parse_model_config
from tests.paths import MODELS

MINIMAL_CONFIG = {
    "architectures": ["SomeForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 64,
    "max_position_embeddings": 128,
}
NAMES = sorted(path.parent.name for path in MODELS.glob("*/config.json"))


def config(model: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((MODELS / model / "config.json").read_text(encoding="utf-8"))
    return loaded


@pytest.mark.parametrize("model", NAMES)
def test_excerpt_gives_the_same_facts_as_the_full_config(model: str) -> None:
    assert parse_model_config(excerpt_config(config(model))) == parse_model_config(config(model))


@pytest.mark.parametrize("model", NAMES)
def test_excerpt_fits_into_a_termination_message(model: str) -> None:
    assert len(json.dumps(excerpt_config(config(model)))) <= 3072


def test_excerpt_of_an_excerpt_is_unchanged() -> None:
    once = excerpt_config(config("gemma-3-27b"))
    assert excerpt_config(once) == once


@pytest.mark.parametrize(
    ("config_fields", "kept"),
    [
        pytest.param({"_name_or_path": "x", "pad_token_id": 0}, {}, id="keys without a fact"),
        pytest.param({"head_dim": None}, {}, id="null"),
        pytest.param(
            {"quantization_config": {"quant_method": "fp8", "modules_to_not_convert": ["lm_head"] * 500}},
            {"quantization_config": {"quant_method": "fp8"}},
            id="layers that are not quantised",
        ),
        pytest.param(
            {
                "quantization_config": {
                    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}}
                }
            },
            {"quantization_config": {"config_groups": {"group_0": {"weights": {"num_bits": 4}}}}},
            id="groups of weights",
        ),
    ],
)
def test_excerpt_leaves_out_keys_without_effect(config_fields: dict[str, Any], kept: dict[str, Any]) -> None:
    assert excerpt_config({**MINIMAL_CONFIG, **config_fields}) == {**MINIMAL_CONFIG, **kept}
