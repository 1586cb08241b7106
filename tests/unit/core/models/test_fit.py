"""Whether a model fits, and the words that say so."""

import json
from dataclasses import replace

import pytest

from fulcrum_core.hardware import Fabric, Vendor, find_hardware, hardware_of
from fulcrum_core.models import (
    Fit,
    KvPrecision,
    Layout,
    ModelFacts,
    WeightPrecision,
    judge_fit,
    parse_model_config,
    weight_bytes,
)
from tests.paths import MODELS


def facts(name: str) -> ModelFacts:
    return parse_model_config(json.loads((MODELS / name / "config.json").read_text(encoding="utf-8")))


def test_a_model_that_fits_is_told_with_its_numbers() -> None:
    assert judge_fit(
        facts("llama-3.1-70b"), hardware_of("H100-SXM"), Layout(tensor=4, max_tokens=32_768)
    ) == Fit(
        verdict="True",
        reason="Fits",
        message="32.9 GiB of weights and 33.3 GiB of KV cache a device, 435,865 tokens: "
        "13.3 requests of 32,768 tokens",
        device_weight_bytes=35_276_193_792,
        kv_capacity_tokens=435_865,
    )


REFUSALS = [
    pytest.param(
        "llama-3.1-70b",
        "H100-SXM",
        Layout(),
        "WeightsTooLarge",
        "131.4 GiB of weights a device do not fit the 66.1 GiB that H100-SXM has for weights and KV cache; "
        "tensor 2 would leave room",
        id="weights are too large",
    ),
    pytest.param(
        "llama-3.1-8b",
        "L4",
        Layout(),
        "ContextTooLong",
        "15.0 GiB of weights and 3.3 GiB of KV cache a device, 26,932 tokens: one request of 131,072 tokens "
        "does not fit; maxLength 26,932 would",
        id="one request does not fit",
    ),
    pytest.param(
        "llama-3.1-8b",
        "L4",
        Layout(max_tokens=200_000),
        "ContextTooLong",
        "maxLength 200,000 is beyond the model's context of 131,072 tokens",
        id="longer than the model knows",
    ),
    pytest.param(
        "llama-3.1-8b",
        "L4",
        Layout(tensor=2, devices=1),
        "DevicesDoNotMatch",
        "tensor 2 × pipeline 1 × data 1 takes 2 devices, the hardware has 1",
        id="devices do not match",
    ),
    pytest.param(
        "llama-3.1-8b",
        "H100-SXM",
        Layout(tensor=3),
        "HeadsDoNotDivide",
        "32 attention heads do not divide over 3 ranks",
        id="heads do not divide",
    ),
    pytest.param(
        "tiny-llama",
        "CPU",
        Layout(pipeline=4),
        "LayersDoNotDivide",
        "2 layers do not divide over 4 pipeline stages",
        id="more stages than layers",
    ),
    pytest.param(
        "llama-3.1-8b",
        "H100-SXM",
        Layout(expert=True),
        "NoExperts",
        "expert parallelism needs a model with experts",
        id="no experts",
    ),
]


@pytest.mark.parametrize(("model", "device", "layout", "reason", "message"), REFUSALS)
def test_what_does_not_fit_is_refused_with_what_would(
    model: str, device: str, layout: Layout, reason: str, message: str
) -> None:
    fit = judge_fit(facts(model), hardware_of(device), layout)
    assert (fit.verdict, fit.reason, fit.message) == ("False", reason, message)


def test_kv_heads_are_shared_or_copied_evenly() -> None:
    qwen = replace(facts("llama-3.1-8b"), attention_heads=28, kv_heads=4)
    fits = {n: judge_fit(qwen, hardware_of("H100-SXM"), Layout(tensor=n)) for n in (2, 7, 28)}
    assert {n: fit.verdict for n, fit in fits.items()} == {2: "True", 7: "False", 28: "True"}
    assert fits[7].message == "4 KV heads and 7 ranks: neither divides the other"


def test_what_cannot_be_known_is_neither_yes_nor_no() -> None:
    llama = facts("llama-3.1-8b")
    assert judge_fit(None, hardware_of("H100-SXM"), Layout()).reason == "ModelUnknown"
    unknown = judge_fit(llama, hardware_of(resource="nvidia.com/gpu"), Layout())
    assert (unknown.verdict, unknown.message) == (
        "Unknown",
        "the memory of GPU is not known, hardware.memory would say it; 15.0 GiB of weights go to each device",
    )
    assert judge_fit(None, hardware_of("H100-SXM"), Layout(tensor=2, devices=1)).verdict == "False"


@pytest.mark.parametrize(
    "better",
    [
        pytest.param(Layout(tensor=4, kv=KvPrecision.FP8), id="KV in FP8"),
        pytest.param(Layout(tensor=4, weights=WeightPrecision.FP8), id="weights in FP8"),
        pytest.param(Layout(tensor=8), id="more devices"),
    ],
)
def test_smaller_values_and_more_devices_leave_more_kv(better: Layout) -> None:
    hardware, llama = hardware_of("H100-SXM"), facts("llama-3.1-70b")
    before, after = judge_fit(llama, hardware, Layout(tensor=4)), judge_fit(llama, hardware, better)
    assert (after.kv_capacity_tokens or 0) > (before.kv_capacity_tokens or 0)


@pytest.mark.parametrize("expert", [pytest.param(False, id="slices"), pytest.param(True, id="whole ones")])
def test_data_parallel_ranks_share_the_experts_and_hold_copies_of_the_rest(expert: bool) -> None:
    deepseek, hardware = facts("deepseek-v3"), hardware_of("H200-SXM")
    assert judge_fit(deepseek, hardware, Layout()).reason == "WeightsTooLarge"
    fit = judge_fit(deepseek, hardware, Layout(data=8, expert=expert))
    rest = weight_bytes(deepseek) - deepseek.expert_params
    assert (fit.verdict, fit.device_weight_bytes) == ("True", round(rest + deepseek.expert_params / 8))


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("H100", "H100-SXM"),
        ("NVIDIA-H100-80GB-HBM3", "H100-SXM"),
        ("nvidia-h100-80gb", "H100-SXM"),
        ("NVIDIA-H100-PCIe", "H100-PCIe"),
        ("NVIDIA-A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA-A100-80GB-PCIe", "A100-80GB"),
        ("NVIDIA-A100-PCIE-40GB", "A100-40GB"),
        ("NVIDIA-L40S", "L40S"),
        ("AMD_Instinct_MI300X_OAM", "MI300X"),
    ],
)
def test_a_device_is_found_under_its_usual_names(name: str, device: str) -> None:
    assert hardware_of(name) == find_hardware(device)


def test_a_manifest_stands_over_the_table() -> None:
    table = hardware_of("H100-SXM")
    assert hardware_of("H100-SXM", memory_bytes=1, fabric=Fabric.ROCE) == replace(
        table, memory_bytes=1, fabric=Fabric.ROCE
    )


def test_a_resource_tells_the_vendor_of_a_device_without_a_name() -> None:
    vendors = {name: hardware_of(resource=name).vendor for name in ("nvidia.com/gpu", "amd.com/gpu", "cpu")}
    assert vendors == {"nvidia.com/gpu": Vendor.NVIDIA, "amd.com/gpu": Vendor.AMD, "cpu": Vendor.CPU}
