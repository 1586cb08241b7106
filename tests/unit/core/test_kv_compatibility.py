"""Which engines can transfer KV blocks to each other, the reason if they cannot, and compatibility groups."""

from dataclasses import replace

import pytest

from fulcrum_core.kv_compatibility import assign_compatibility_groups, can_transfer
from fulcrum_core.values import EngineIdentity
from fulcrum_core.verdict import Verdict

SIMULATED = EngineIdentity(model="m", engine="vllm 0.12", kv_dtype="bf16", block_size=16, tensor_parallel=2)


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
            {"kv_dtype": "fp8"}, "KV data type differs: prefill has bf16, decode has fp8", id="KV data type"
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
    assert can_transfer(SIMULATED, replace(SIMULATED, **changes)) == Verdict(False, reason)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "tensor_parallel",
    [
        pytest.param(2, id="equal sizes"),
        pytest.param(4, id="decode has more ranks"),
        pytest.param(1, id="decode has fewer ranks"),
    ],
)
def test_tensor_parallel_sizes_that_divide_can_transfer(tensor_parallel: int) -> None:
    verdict = can_transfer(SIMULATED, replace(SIMULATED, tensor_parallel=tensor_parallel))
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
def test_vllm_identities_that_differ_cannot_transfer(changes: dict[str, object], reason: str) -> None:
    vllm = replace(SIMULATED, connector="NIXL", dtype="bfloat16", attention="FLASH_ATTN")
    assert can_transfer(vllm, replace(vllm, **changes)) == Verdict(False, reason)  # type: ignore[arg-type]


def test_prefill_may_have_pipeline_stages() -> None:
    assert can_transfer(replace(SIMULATED, pipeline_parallel=4), SIMULATED).allowed


def test_fewer_decode_ranks_cannot_read_copied_kv_heads() -> None:
    """Fewer decode ranks can read KV heads that are on one rank each, but not copies (8 heads on 16 ranks).

    With latent attention they always can.
    """
    eight = replace(SIMULATED, tensor_parallel=8, kv_heads=8)
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
    one = replace(SIMULATED, connector="LMCache")
    assert can_transfer(one, one).allowed
    assert can_transfer(one, replace(one, tensor_parallel=4)) == Verdict(
        False,
        "prefill has 2 tensor-parallel ranks, decode has 4: "
        "LMCache transfers KV only between ranks of the same number",
    )


def test_instances_that_can_transfer_in_either_direction_are_in_one_group() -> None:
    many_ranks = replace(SIMULATED, tensor_parallel=16, kv_heads=8)
    fewer_ranks = replace(many_ranks, tensor_parallel=8)
    other_version = replace(SIMULATED, engine="vllm 0.13")
    assert not can_transfer(many_ranks, fewer_ranks).allowed
    groups = assign_compatibility_groups({"a": many_ranks, "b": other_version, "c": fewer_ranks})
    assert groups == {"a": 0, "b": 1, "c": 0}


def test_an_instance_of_unknown_identity_is_in_the_first_group() -> None:
    other_version = replace(SIMULATED, engine="vllm 0.13")
    groups = assign_compatibility_groups({"a": SIMULATED, "b": other_version, "c": None})
    assert groups == {"a": 0, "b": 1, "c": 0}
