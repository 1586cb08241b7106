"""Identity and KV lease of an engine follow the user's own arguments."""

from dataclasses import replace

import pytest

from fulcrum_core.hardware import resolve_hardware
from fulcrum_core.kv_compatibility import can_transfer
from fulcrum_core.values import KV_LEASE_S, EngineIdentity, Slo
from fulcrum_operator.engines.launch_request import LaunchRequest
from fulcrum_operator.engines.vllm import POD_PLACEMENT, VERSION, expected_identity_and_startup_s
from tests.unit.operator.engine_cases import fixture_facts

REQUEST = LaunchRequest(
    model="llama-3.1-70b",
    pool_role="Flexible",
    slo=Slo(ttft_s=10.0, tpot_s=0.05),
    proxy_host="chat.default.svc",
    drain_timeout_s=120.0,
    facts=fixture_facts("llama-3.1-70b"),
    hardware=resolve_hardware("H100-SXM"),
    version=VERSION,
)


def identity_of(*args: str) -> EngineIdentity:
    """Identity of an engine with these arguments."""
    return expected_identity_and_startup_s(replace(REQUEST, args=args), POD_PLACEMENT)[0].to_identity()


USER_ARGS_CASES = [
    pytest.param((), {}, id="no arguments"),
    pytest.param(("--enable-lora", "--seed", "3"), {}, id="arguments that do not change the identity"),
    pytest.param(("--block-size", "64", "--block-size", "32"), {"block_size": 32}, id="the last value wins"),
    pytest.param(("--block_size=64",), {"block_size": 64}, id="with = and underscores"),
    pytest.param(("-tp", "2", "-pp", "3"), {"tensor_parallel": 2, "pipeline_parallel": 3}, id="short forms"),
    pytest.param(("--block-size", "many"), {}, id="an invalid value, which the engine refuses"),
    pytest.param(("-tp", "0", "-pp", "9" * 5000), {}, id="numbers out of range"),
    pytest.param(
        ("--dtype", "half", "--revision=abc"), {"dtype": "half", "revision": "abc"}, id="text values"
    ),
    pytest.param(("--block-size",), {}, id="missing value"),
]


@pytest.mark.parametrize(("args", "expected"), USER_ARGS_CASES)
def test_user_arguments_change_the_identity(args: tuple[str, ...], expected: dict[str, object]) -> None:
    assert identity_of(*args) == replace(identity_of(), **expected)  # type: ignore[arg-type]


NESTED_CONFIG = (
    '{"kv_connector_extra_config":{"connectors":[{"kv_connector_extra_config":{"kv_lease_duration":2}},{}]}}'
)


@pytest.mark.parametrize(
    ("config", "expected_s"),
    [
        pytest.param('{"kv_connector_extra_config":{"kv_lease_duration":2}}', 2.0, id="written"),
        pytest.param(NESTED_CONFIG, 2.0, id="of one connector among several"),
        pytest.param(
            '{"kv_connector":"NixlConnector"}', KV_LEASE_S, id="no lease: the default of the engine"
        ),
        pytest.param('{"kv_connector_extra_config":7}', KV_LEASE_S, id="extra config of the wrong type"),
        *(
            pytest.param(
                f'{{"kv_connector_extra_config":{{"kv_lease_duration":{lease}}}}}',
                KV_LEASE_S,
                id=f"invalid lease {lease}",
            )
            for lease in ("-5", "0", "NaN", "1e999")
        ),
        pytest.param("{", 55.0, id="an invalid value, which the engine refuses"),
        pytest.param("[" * 100_000, 55.0, id="JSON nested too deep"),
    ],
)
def test_reported_kv_lease_is_the_one_in_the_user_arguments(config: str, expected_s: float) -> None:
    """By default the lease follows from objective and model: 55 s."""
    assert identity_of("--kv-transfer-config", config).kv_lease_s == expected_s
    assert identity_of().kv_lease_s == 55.0


def test_engine_with_another_block_size_in_its_arguments_is_not_paired() -> None:
    verdict = can_transfer(identity_of(), identity_of("--seed", "1", "--block_size=64"))
    assert (verdict.allowed, verdict.reason) == (False, "block size differs: prefill has 128, decode has 64")
