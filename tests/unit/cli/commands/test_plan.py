"""`fulcrum plan` shows what a manifest would start, and why, from files only."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fulcrum_cli.__main__ import main
from tests.paths import EXAMPLES, MODELS

Plan = Callable[..., tuple[int, str]]
GPU = "hardware: {resource: nvidia.com/gpu, count: %d, type: H100-SXM, fabric: InfiniBand}"


@pytest.fixture
def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Plan:
    """Return a function that plans a service with a spec, and returns exit code and output."""

    def run(spec: str, *arguments: str) -> tuple[int, str]:
        file = tmp_path / "chat.yaml"
        head = "apiVersion: fulcrum.dev/v1alpha1\nkind: PDService\nmetadata: {name: chat}\nspec:\n"
        file.write_text(head + "".join(f"  {line}\n" for line in spec.splitlines()), encoding="utf-8")
        with pytest.raises(SystemExit) as exited:
            main(["plan", "-f", str(file), *arguments])
        out, err = capsys.readouterr()
        return (int(exited.value.code or 0), out + err)

    return run


def service(*pools: str, model: str = "meta-llama/Llama-3.1-70B-Instruct", more: str = "") -> str:
    lines = [f"model: {model}", "engine: {type: vLLM}", "modelSource: {maxLength: 32768}"]
    return "\n".join([*lines, *filter(None, [more]), "pools:", *pools])


def pool(name: str, role: str, devices: int) -> str:
    return f"- {{name: {name}, role: {role}, instances: {{min: 2}}, {GPU % devices}}}"


LLAMA = ("--model-config", str(MODELS / "llama-3.1-70b"))


def test_plan_prints_sizes_settings_and_command_with_reasons(plan: Plan) -> None:
    code, output = plan(service(pool("flex", "Flexible", 4)), *LLAMA)
    assert code == 0
    for line in (
        "  shape: LlamaForCausalLM, 80 layers, GQA: 64 heads, 8 of KV of 128 values, 131,072 tokens",
        "  parameters: 70.55 billion, 69.50 a token",
        "  weights: 131.4 GiB, bfloat16",
        "  KV: 327,680 bytes a token, 10.0 GiB for 32,768 tokens",
        "  fits: True, Fits: 32.9 GiB of weights and 33.3 GiB of KV cache a device, 435,865 tokens: "
        "13.3 requests of 32,768 tokens",
        "  weights bfloat16 as the checkpoint has them: 131.4 GiB",
        "  kvCache bfloat16 the data type of the model: 327,680 bytes a token",
        "  maxSequences 256 KV capacity for 425 requests of 1,024 tokens",
        "  cpu 6, at most 24 a core for each rank, each scheduler and the API server",
        "  memory 20.0 GiB, at most 48.0 GiB the processes",
        "  ports: http 8000, kv-0 5600",
        "  volumes: shared-memory at /dev/shm (memory, 8.0 GiB)",
        "  pool chat-flex → pool chat-flex: yes, same model, engine, KV data type and block size",
    ):
        assert line in [re.sub(r"(?<=\S) +", " ", printed) for printed in output.splitlines()]
    assert "    vllm serve meta-llama/Llama-3.1-70B-Instruct --served-model-name" in output


def test_plan_without_model_config_prints_what_does_not_depend_on_it(plan: Plan) -> None:
    code, output = plan(service(pool("flex", "Flexible", 4)))
    missing = "  config.json not found: pass --model-config; what depends on the model is left out"
    assert code == 0
    assert output.splitlines()[1] == missing
    unknown = "  fits: Unknown, ModelUnknown: the model's config.json was not read; pass --model-config"
    assert unknown in output.splitlines()
    assert "; the transfer time of the longest prompt is not known\n" in output
    assert "--tensor-parallel-size 4" in output


@pytest.mark.parametrize(
    ("spec", "output"),
    [
        pytest.param(
            service(pool("flex", "Flexible", 1)),
            "  fits: False, WeightsTooLarge: 131.4 GiB",
            id="does not fit",
        ),
        pytest.param(
            service(pool("p", "Prefill", 16), pool("d", "Decode", 4)),
            "  pool chat-p → pool chat-d: no, prefill has 16 tensor-parallel ranks, decode has 4: of 8 KV",
            id="no compatible pair of pools",
        ),
        pytest.param(
            service("- {name: f, instances: {min: 2}, settings: {sleepMode: true}, " + GPU % 4 + "}"),
            "  refused: sleepMode with NIXL: vLLM 0.32.0 does not register KV memory after waking",
            id="refused",
        ),
    ],
)
def test_a_service_that_cannot_work_is_exit_code_1(plan: Plan, spec: str, output: str) -> None:
    code, text = plan(spec, *LLAMA)
    assert code == 1
    assert any(line.startswith(output) for line in text.splitlines())


def test_prefill_may_be_split_over_more_devices_than_decode(plan: Plan) -> None:
    code, output = plan(service(pool("p", "Prefill", 8), pool("d", "Decode", 2)), *LLAMA)
    assert code == 1  # 70 billion parameters do not fit two devices
    allowed = "  pool chat-p → pool chat-d: yes, same model, engine, KV data type and block size"
    assert allowed in output.splitlines()


def test_an_engine_whose_role_is_fixed_at_start_is_planned_once_for_each_role(plan: Plan) -> None:
    lmcache = service(pool("flex", "Flexible", 4), more="kvTransfer: {connector: LMCache}")
    code, output = plan(lmcache, *LLAMA, "-o", "json")
    pools = json.loads(output)["services"][0]["pools"]
    assert code == 0
    assert [(found["role"], found["strategy"]) for found in pools] == [
        ("Prefill", "Restart"),
        ("Decode", "Restart"),
    ]
    assert ['"pd_role":"sender"' in found["command"][-1].replace("lmcache.", "") for found in pools] == [
        True,
        False,
    ]


def test_plan_json_contains_the_figures_of_the_text(plan: Plan) -> None:
    _, output = plan(service(pool("flex", "Flexible", 4)), *LLAMA, "-o", "json")
    document: dict[str, Any] = json.loads(output)["services"][0]
    found = document["pools"][0]
    assert document["facts"]["kv_bytes_per_token"] == 327_680
    assert (found["fit"]["reason"], found["fit"]["kv_capacity_tokens"]) == ("Fits", 435_865)
    assert found["env"]["POD_IP"] == "<status.podIP>"
    assert found["ports"] == {"http": 8000, "kv-0": 5600}
    assert [volume["mount"] for volume in found["volumes"]] == ["/dev/shm"]
    assert document["pairs"][0]["allowed"] is True


def test_the_model_config_is_read_from_the_host_path_of_the_manifest(plan: Plan) -> None:
    spec = f"model: tiny\nengine: {{type: vLLM}}\nmodelSource: {{hostPath: {MODELS / 'tiny-llama'}}}"
    _, output = plan(spec)
    assert output.splitlines()[1] == f"  {MODELS / 'tiny-llama' / 'config.json'}"


def test_a_simulated_engine_has_no_model_to_fit(plan: Plan) -> None:
    code, output = plan("model: m\nengine: {type: Simulated}")
    assert (code, output.splitlines()[1]) == (0, "  engine.type is Simulated: there is no model to fit")


def test_plan_refuses_an_unknown_profile_as_up_does(plan: Plan) -> None:
    code, output = plan("model: m\nengine: {type: Simulated, profile: desktop}")
    assert (code, "spec.engine.profile (desktop) is not one of " in output) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(
            ("--model-config", "/none/config.json"),
            "error: /none/config.json (No such file or directory) must be a model's config.json\n",
            id="no such file",
        ),
        pytest.param(
            ("--model-config", __file__),
            f"error: {__file__} (not JSON) must be a model's config.json\n",
            id="no JSON",
        ),
        pytest.param(
            ("-o", "xml"), "error: --output (xml) is not one of json, yaml\n", id="an unknown output format"
        ),
    ],
)
def test_plan_refuses_unreadable_input_in_one_line(
    plan: Plan, arguments: tuple[str, ...], message: str
) -> None:
    assert plan(service(pool("flex", "Flexible", 4)), *arguments) == (2, message)


def test_the_example_for_cpus_is_planned_for_cpus(capsys: pytest.CaptureFixture[str]) -> None:
    example = EXAMPLES / "vllm-cpu.yaml"
    with pytest.raises(SystemExit) as exited:
        main(["plan", "-f", str(example), "--model-config", str(MODELS / "llama-3.1-70b")])
    output = capsys.readouterr().out
    assert exited.value.code in (None, 0)
    assert "    UCX_TLS=tcp,sm,self\n" in output
    assert "gpu" not in output
    assert "transfer buffer" not in output
