"""Which pairs of engines can transfer KV, and the reason if they cannot."""

from dataclasses import replace

import pytest

from fulcrum_core.decisions import Verdict
from fulcrum_core.kv_compatibility import can_transfer
from fulcrum_core.values import EngineIdentity

ONE = EngineIdentity(model="m", engine="vllm 0.12", kv_dtype="bf16", block_size=16, tensor_parallel=2)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        pytest.param(
            {"model": "M"}, "model differs: prefill has m, decode has M", id="model name that differs in case"
        ),
        pytest.param(
            {"engine": "vllm 0.13"},
            "engine differs: prefill has vllm 0.12, decode has vllm 0.13",
            id="engine version",
        ),
        pytest.param(
            {"kv_dtype": "fp8"}, "kv dtype differs: prefill has bf16, decode has fp8", id="KV data type"
        ),
        pytest.param(
            {"block_size": 32}, "block size differs: prefill has 16, decode has 32", id="block size"
        ),
        pytest.param(
            {"tensor_parallel": 3},
            "prefill has 2 tensor-parallel ranks, decode has 3: neither divides the other",
            id="tensor-parallel sizes that do not divide",
        ),
    ],
)
def test_engines_that_differ_cannot_transfer(changes: dict[str, object], reason: str) -> None:
    assert can_transfer(ONE, replace(ONE, **changes)) == Verdict(False, reason)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "tensor_parallel",
    [
        pytest.param(2, id="equal sizes"),
        pytest.param(4, id="decode has more ranks"),
        pytest.param(1, id="decode has fewer ranks"),
    ],
)
def test_tensor_parallel_sizes_that_divide_can_transfer(tensor_parallel: int) -> None:
    verdict = can_transfer(ONE, replace(ONE, tensor_parallel=tensor_parallel))
    assert verdict == Verdict(True, "same model, engine, KV data type and block size")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        pytest.param(
            {"revision": "abc"},
            "model revision differs: prefill has none, decode has abc",
            id="model revision",
        ),
        pytest.param(
            {"connector": "LMCache"},
            "connector differs: prefill has NIXL, decode has LMCache",
            id="connector",
        ),
        pytest.param(
            {"dtype": "float16"},
            "data type differs: prefill has bfloat16, decode has float16",
            id="data type",
        ),
        pytest.param(
            {"attention": "FLASHINFER"},
            "attention back end differs: prefill has FLASH_ATTN, decode has FLASHINFER",
            id="attention backend",
        ),
        pytest.param(
            {"pipeline_parallel": 2},
            "decode has 2 pipeline stages and reads KV into one only",
            id="pipeline stages of decode",
        ),
        pytest.param(
            {"latent": True},
            "latent attention differs: prefill has False, decode has True",
            id="latent vector and KV heads",
        ),
    ],
)
def test_real_engines_that_differ_cannot_transfer(changes: dict[str, object], reason: str) -> None:
    real = replace(ONE, connector="NIXL", dtype="bfloat16", attention="FLASH_ATTN")
    assert can_transfer(real, replace(real, **changes)) == Verdict(False, reason)  # type: ignore[arg-type]


def test_prefill_may_have_pipeline_stages() -> None:
    assert can_transfer(replace(ONE, pipeline_parallel=4), ONE).allowed


def test_fewer_decode_ranks_cannot_read_copied_kv_heads() -> None:
    """8 KV heads on 8 ranks can be read by 2 ranks, copies on 16 ranks cannot; a latent vector always can."""
    eight = replace(ONE, tensor_parallel=8, kv_heads=8)
    assert can_transfer(eight, replace(eight, tensor_parallel=2)).allowed
    sixteen = replace(eight, tensor_parallel=16)
    assert can_transfer(sixteen, eight) == Verdict(
        False,
        "prefill has 16 tensor-parallel ranks, decode has 8: of 8 KV heads prefill holds copies, which fewer "
        "ranks cannot read",
    )
    assert can_transfer(eight, sixteen).allowed
    latent = replace(sixteen, latent=True, kv_heads=1)
    assert can_transfer(latent, replace(latent, tensor_parallel=1)).allowed


def test_lmcache_needs_equal_tensor_parallel_sizes() -> None:
    one = replace(ONE, connector="LMCache")
    assert can_transfer(one, one).allowed
    assert can_transfer(one, replace(one, tensor_parallel=4)) == Verdict(
        False,
        "prefill has 2 tensor-parallel ranks, decode has 4: "
        "LMCache transfers KV only between ranks of the same number",
    )
