"""Shipped profiles load; an invalid profile of a user is refused with the reason."""

from pathlib import Path

import pytest
import yaml

from fulcrum_core.errors import InvalidInput
from fulcrum_core.profiles import PROFILE_NAMES, EngineProfile, load_profile, parse_profile

LAPTOP = load_profile("laptop")
FIELDS = LAPTOP.model_dump()
BAD_VALUE = "has a value that is not of its type, or a number of thousands of digits"
WITHOUT_T0 = yaml.safe_dump({name: value for name, value in FIELDS.items() if name != "t0"})


def test_shipped_profiles_load_within_their_physical_limits() -> None:
    assert {name: load_profile(name).name for name in PROFILE_NAMES} == {
        name: name
        for name in ("l70-a100-tp8", "l70-h100-tp4", "l70-h100-tp4-warm", "l8-h100", "laptop", "q32-a100")
    }


def test_description_of_real_hardware_profiles_names_them_unmeasured() -> None:
    real = [load_profile(name) for name in PROFILE_NAMES if name != "laptop"]
    silent = [p.name for p in real if "published coefficients, not measured" not in p.description]
    assert silent == []


def test_laptop_profile_saturates_at_ten_requests() -> None:
    step = LAPTOP.step_model
    one, ten = step.step_s([], [600]), step.step_s([], [600] * 10)
    prefill_tokens_s = 2000 / step.prefill_model(LAPTOP.token_budget).ttft_s(2000)
    transfer_s = LAPTOP.link_setup_s + 2000 * LAPTOP.kv_bytes_per_token / LAPTOP.link_bytes_per_s
    assert (
        0.018 <= one <= 0.025,
        0.045 <= ten <= 0.055,
        2500 <= prefill_tokens_s <= 4000,
        0.012 <= transfer_s <= 0.018,
    ) == (True, True, True, True)


def test_profile_is_loaded_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({**FIELDS, "name": "mine"}))
    assert load_profile(str(path)) == LAPTOP.model_copy(update={"name": "mine"})


def problem_of(changes: dict[str, object], *, without: str = "") -> str:
    fields = {key: value for key, value in {**FIELDS, **changes}.items() if key != without}
    with pytest.raises(InvalidInput) as refusal:
        parse_profile(yaml.safe_dump(fields), source="mine.yaml")
    return str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param(
            {"b": 1e-5},
            "mine.yaml.b (1e-05) is below its physical limit 0.000125 = "
            "2*params/(tensor_parallel*peak_flops)",
            id="prefill faster than the arithmetic",
        ),
        pytest.param(
            {"d2": 1e-9},
            "mine.yaml.d2 (1e-09) is below its physical limit 8.19e-08 = "
            "kv_bytes_per_token/(tensor_parallel*hbm_bytes_per_s)",
            id="decode faster than reading the KV cache",
        ),
        pytest.param(
            {"t0": 0.001},
            "mine.yaml.t0 (0.001) is below its physical limit 0.01 = "
            "weight_bytes/(tensor_parallel*hbm_bytes_per_s)",
            id="a step faster than reading the weights",
        ),
        pytest.param({"b": float("nan")}, "mine.yaml.b (nan) is not a finite number", id="NaN"),
        pytest.param({"t0": 0}, "mine.yaml.t0 (0) is not greater than 0", id="no fixed duration"),
        pytest.param({"block_size": -16}, "mine.yaml.block_size (-16) is not greater than 0", id="negative"),
        pytest.param(
            {"max_seqs": 1024},
            "mine.yaml.max_seqs (1024) is greater than token_budget (512): a decode step would not fit",
            id="more requests than the token budget",
        ),
        pytest.param(
            {"kv_capacity_tokens": 8},
            "mine.yaml.kv_capacity_tokens (8) is less than block_size (16)",
            id="less than one block",
        ),
        pytest.param(
            {"colour": "red"}, "mine.yaml.colour (red) is not a field of an engine profile", id="unknown"
        ),
        pytest.param({"t0": 1e300}, "mine.yaml.t0 (1e+300) is greater than 3600", id="endless steps"),
        pytest.param({"c": 1e300}, "mine.yaml.c (1e+300) is greater than 3600", id="endless attention"),
        pytest.param(
            {"d2": 1.0},
            "mine.yaml (72089.8 s) is its longest step: the limit is 3600 s",
            id="a longest step of a day",
        ),
        pytest.param(
            {"kv_capacity_tokens": 999_999_999_999},
            "mine.yaml.kv_capacity_tokens (999999999999) is greater than 1e+09",
            id="a KV cache larger than memory",
        ),
        pytest.param(
            {"kv_capacity_tokens": 100_000_000, "block_size": 1},
            "mine.yaml.kv_capacity_tokens (100000000) makes 100,000,000 blocks: the limit is 10,000,000",
            id="more blocks than memory has room for",
        ),
        pytest.param(
            {"token_budget": 10**4000},
            f"mine.yaml.token_budget (1{'0' * 76}...) is greater than 1e+07",
            id="a number of 4,000 digits",
        ),
        pytest.param(
            {"params": 10**4000},
            f"mine.yaml.params (1{'0' * 76}...) is greater than 1e+18",
            id="a count of 4,000 digits",
        ),
        pytest.param(
            {"name": ["a", "b"]}, "mine.yaml.name (list) is not text or a number", id="a list as a value"
        ),
        pytest.param(
            {"name": "a" * 300}, f"mine.yaml.name ({'a' * 77}...) is longer than 253 characters", id="a name"
        ),
    ],
)
def test_impossible_profile_is_refused_with_path_value_and_rule(
    changes: dict[str, object], message: str
) -> None:
    assert problem_of(changes) == message


def test_missing_field_is_named() -> None:
    assert problem_of({}, without="t0") == "mine.yaml.t0 (missing) is required"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a list", "profile (mine.yaml) is not a mapping of profile fields"),
        ("", "profile (mine.yaml) is not a mapping of profile fields"),
        ("[" * 5000, "profile (mine.yaml) is not YAML: is nested too deeply"),
        (f"t0: {'9' * 5000}", "profile (mine.yaml) is not YAML: " + BAD_VALUE),
        ("t0: !!bool x", "profile (mine.yaml) is not YAML: " + BAD_VALUE),
        ("t0: 1\n---\nt0: 1", "profile (mine.yaml) is not a mapping of profile fields"),
        (
            f"{WITHOUT_T0}t0: 0x{'F' * 5000}",
            "mine.yaml.t0 (a number of thousands of digits) is not a number",
        ),
        (
            "t0: 1\nb: 1\nt0: 2",
            "profile (mine.yaml) is not YAML: t0 is written twice "
            'in "<unicode string>", line 3, column 1: t0: 2 ^',
        ),
    ],
    ids=[
        "a list",
        "empty",
        "nested",
        "digits",
        "a tag",
        "documents",
        "hexadecimal digits",
        "a field twice",
    ],
)
def test_yaml_that_is_not_a_mapping_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        parse_profile(text, source="mine.yaml")
    assert str(refusal.value) == message


@pytest.mark.parametrize("content", [b"a: [", b"\xff\xfe", b"a: \x00"])
def test_unreadable_file_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.yaml"
    path.write_bytes(content)
    with pytest.raises(InvalidInput) as refusal:
        load_profile(str(path))
    assert str(refusal.value).count("\n") == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h200", f"profile (h200) is not one of {', '.join(PROFILE_NAMES)}, nor a .yaml file"),
        ("nowhere/mine.yaml", "profile (nowhere/mine.yaml) cannot be read: no such file or directory"),
    ],
)
def test_missing_profile_is_refused(name: str, message: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        load_profile(name)
    assert str(refusal.value) == message


def test_profile_counts_only_whole_blocks() -> None:
    fields = {**FIELDS, "kv_capacity_tokens": 47}
    assert EngineProfile.model_validate(fields).kv_blocks == 2
