"""Whether a model fits a device, and the message with the numbers."""

import json
from dataclasses import replace

import pytest

from fulcrum_core.hardware import Fabric, Vendor, find_hardware, resolve_hardware
from fulcrum_core.models import (
    Fit,
    KvPrecision,
    Layout,
    ModelFacts,
    WeightPrecision,
    check_fit,
    parse_model_config,
    weight_bytes,
)
from tests.paths import MODELS


def facts(name: str) -> ModelFacts:
    return parse_model_config(json.loads((MODELS / name / "config.json").read_text(encoding="utf-8")))


def test_fit_message_has_the_numbers() -> None:
    assert check_fit(
        facts("llama-3.1-70b"), resolve_hardware("H100-SXM"), Layout(tensor=4, max_tokens=32_768)
    ) == Fit(
        status="True",
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
        id="longer than the model's context",
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
def test_misfit_names_what_would_fit(
    model: str, device: str, layout: Layout, reason: str, message: str
) -> None:
    fit = check_fit(facts(model), resolve_hardware(device), layout)
    assert (fit.status, fit.reason, fit.message) == ("False", reason, message)


def test_kv_heads_and_ranks_must_divide() -> None:
    qwen = replace(facts("llama-3.1-8b"), attention_heads=28, kv_heads=4)
    fits = {n: check_fit(qwen, resolve_hardware("H100-SXM"), Layout(tensor=n)) for n in (2, 7, 28)}
    assert {n: fit.status for n, fit in fits.items()} == {2: "True", 7: "False", 28: "True"}
    assert fits[7].message == "4 KV heads and 7 ranks: neither divides the other"


def test_unknown_model_or_memory_gives_unknown() -> None:
    llama = facts("llama-3.1-8b")
    assert check_fit(None, resolve_hardware("H100-SXM"), Layout()).reason == "ModelUnknown"
    unknown = check_fit(llama, resolve_hardware(resource="nvidia.com/gpu"), Layout())
    assert (unknown.status, unknown.message) == (
        "Unknown",
        "the memory of GPU is not known, hardware.memory would say it; 15.0 GiB of weights go to each device",
    )
    assert check_fit(None, resolve_hardware("H100-SXM"), Layout(tensor=2, devices=1)).status == "False"


@pytest.mark.parametrize(
    "better",
    [
        pytest.param(Layout(tensor=4, kv=KvPrecision.FP8), id="KV in FP8"),
        pytest.param(Layout(tensor=4, weights=WeightPrecision.FP8), id="weights in FP8"),
        pytest.param(Layout(tensor=8), id="more devices"),
    ],
)
def test_smaller_values_and_more_devices_leave_more_kv(better: Layout) -> None:
    hardware, llama = resolve_hardware("H100-SXM"), facts("llama-3.1-70b")
    before, after = check_fit(llama, hardware, Layout(tensor=4)), check_fit(llama, hardware, better)
    assert (after.kv_capacity_tokens or 0) > (before.kv_capacity_tokens or 0)


@pytest.mark.parametrize(
    "expert", [pytest.param(False, id="experts split"), pytest.param(True, id="experts distributed whole")]
)
def test_data_parallel_ranks_split_experts_and_copy_the_rest(expert: bool) -> None:
    deepseek, hardware = facts("deepseek-v3"), resolve_hardware("H200-SXM")
    assert check_fit(deepseek, hardware, Layout()).reason == "WeightsTooLarge"
    fit = check_fit(deepseek, hardware, Layout(data=8, expert=expert))
    rest = weight_bytes(deepseek) - deepseek.expert_params
    assert (fit.status, fit.device_weight_bytes) == ("True", round(rest + deepseek.expert_params / 8))


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
def test_device_is_found_under_its_usual_names(name: str, device: str) -> None:
    assert resolve_hardware(name) == find_hardware(device)


def test_manifest_overrides_the_device_table() -> None:
    table = resolve_hardware("H100-SXM")
    assert resolve_hardware("H100-SXM", memory_bytes=1, fabric=Fabric.ROCE) == replace(
        table, memory_bytes=1, fabric=Fabric.ROCE
    )


def test_vendor_follows_from_the_resource_name() -> None:
    vendors = {
        name: resolve_hardware(resource=name).vendor for name in ("nvidia.com/gpu", "amd.com/gpu", "cpu")
    }
    assert vendors == {"nvidia.com/gpu": Vendor.NVIDIA, "amd.com/gpu": Vendor.AMD, "cpu": Vendor.CPU}
