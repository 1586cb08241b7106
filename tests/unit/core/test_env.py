"""Environment variables of engines: references to Secrets, ConfigMaps and fields; literal tokens."""

import pytest

from fulcrum_core.api import PDService
from fulcrum_core.api.env import KEY_ARGUMENT_MESSAGE
from fulcrum_core.api.manifest import load_manifest, read_yaml
from fulcrum_core.api.pod_template import IPC_LOCK_RULE
from fulcrum_core.errors import InvalidInput

HEAD = "apiVersion: fulcrum.dev/v1alpha1\nkind: PDService\nmetadata: {name: chat}\n"
TOKEN = "hf_AbCdEfGhIjKlMnOpQrStUvWxYz01234567"


def service(engine: str) -> PDService:
    (loaded,) = load_manifest(f"{HEAD}spec: {{model: m, engine: {engine}}}\n", source="chat.yaml")
    assert isinstance(loaded, PDService)
    return loaded


@pytest.mark.parametrize(
    "variable",
    [
        f"{{name: HF_TOKEN, value: {TOKEN}}}",
        f"{{name: ANYTHING, value: 'Bearer {TOKEN}'}}",
        "{name: VLLM_API_KEY, value: abc-123}",
        "{name: REDIS_PASSWORD, value: hunter2}",
        "{name: AWS_SECRET_ACCESS_KEY, value: x}",
        "{name: mytoken, value: abcdef}",
        "{name: client-secrets, value: abcdef}",
    ],
)
def test_a_literal_that_looks_like_a_token_is_refused_without_repeating_it(variable: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        service(f"{{env: [{variable}]}}")
    name = variable.partition("name: ")[2].partition(",")[0]
    assert str(refused.value) == (
        "chat.yaml[0]: spec (not shown) has a literal in engine.env that looks like a token: keep it in a "
        "Secret and write valueFrom: {secretKeyRef: {name: SECRET, key: KEY}} instead of value "
        f"(variable {name})"
    )


@pytest.mark.parametrize(
    "args", ["[--api-key, abc]", "[--api-key=abc]", "[--api_key=abc]", "[--api-key=$(A)b]"]
)
def test_a_key_in_an_argument_is_refused_with_the_way_to_do_it(args: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        service(f"{{args: {args}}}")
    assert str(refused.value) == f"chat.yaml[0]: spec (not shown) {KEY_ARGUMENT_MESSAGE}"


@pytest.mark.parametrize(
    "args", ["[--api-key=$(VLLM_KEY)]", "[--hf_overrides, '{}']", "[--api-key-file=/run/key]"]
)
def test_other_arguments_are_accepted(args: str) -> None:
    assert service(f"{{args: {args}}}").spec.engine.args


def test_a_stored_service_with_a_token_is_read() -> None:
    """A rule that is newer than a stored object must not keep the operator from reading it."""
    spec = {"model": "m", "engine": {"env": [{"name": "HF_TOKEN", "value": TOKEN}], "args": ["--api-key=a"]}}
    read = PDService.model_validate({"kind": "PDService", "metadata": {"name": "chat"}, "spec": spec})
    assert read.spec.engine.env[0].value == TOKEN


def template(container: str) -> PDService:
    pool = f"{{name: a, instances: {{min: 2}}, template: {{spec: {{containers: [{container}]}}}}}}"
    (loaded,) = load_manifest(f"{HEAD}spec: {{model: m, pools: [{pool}]}}\n", source="chat.yaml")
    assert isinstance(loaded, PDService)
    return loaded


@pytest.mark.parametrize(
    ("container", "problem"),
    [
        (
            f"{{name: engine, env: [{{name: A, value: {TOKEN}}}]}}",
            "the literal of A looks like a token: keep it in a Secret and write "
            "valueFrom: {secretKeyRef: {name: SECRET, key: KEY}} instead of value",
        ),
        (
            "{name: engine, args: [--api-key, abc]}",
            "an argument contains a token: keep it in a Secret and write $(VARIABLE) in the argument",
        ),
        ("{name: engine, securityContext: {capabilities: {add: [IPC_LOCK]}}}", IPC_LOCK_RULE),
    ],
    ids=["a token", "a key", "IPC_LOCK without root"],
)
def test_a_problem_of_a_template_is_refused_in_a_manifest_and_named_of_a_stored_service(
    container: str, problem: str
) -> None:
    message = f"pool a: template: container engine: {problem}"
    with pytest.raises(InvalidInput) as refused:
        template(container)
    assert str(refused.value) == f"chat.yaml[0]: spec (not shown) {message}"
    pools = [
        {"name": "a", "instances": {"min": 2}, "template": {"spec": {"containers": [read_yaml(container)]}}}
    ]
    stored = {"kind": "PDService", "metadata": {"name": "c"}, "spec": {"model": "m", "pools": pools}}
    assert PDService.model_validate(stored).spec.find_template_problems() == (message,)


def test_ipc_lock_is_no_problem_for_root() -> None:
    context = "{runAsUser: 0, capabilities: {add: [IPC_LOCK]}}"
    assert template(f"{{name: engine, securityContext: {context}}}").spec.find_template_problems() == ()


def test_a_token_in_an_argument_is_refused_without_repeating_it() -> None:
    with pytest.raises(InvalidInput) as refused:
        service(f"{{args: [--hf-token, {TOKEN}]}}")
    assert "has a token in engine.args" in str(refused.value)
    assert TOKEN not in str(refused.value)


@pytest.mark.parametrize(
    "variable",
    [
        "{name: TOKENIZERS_PARALLELISM, value: 'sequential'}",
        "{name: MAX_TOKENS_PER_STEP, value: 'unlimited'}",
        "{name: HF_HUB_DISABLE_IMPLICIT_TOKEN, value: 'true'}",
        "{name: HF_TOKEN_PATH, value: /run/secrets/hub/token}",
        "{name: HF_TOKEN, value: ''}",
        "{name: KEYBOARD, value: 'qwerty'}",
        "{name: VLLM_MAX_TOKEN_BUDGET, value: 'unlimited'}",
        "{name: SORT_KEY, value: 'arrival'}",
        "{name: PAD_TOKEN, value: '<pad>'}",
        "{name: VLLM_API_KEY, value: '$(KEY_OF_SECRET)'}",
        "{name: STOP_TOKEN, value: '151643'}",
        "{name: NAMES, value: 'hf_x and others'}",
    ],
)
def test_other_literals_are_accepted(variable: str) -> None:
    assert len(service(f"{{env: [{variable}]}}").spec.engine.env) == 1


@pytest.mark.parametrize(
    "source",
    [
        "{secretKeyRef: {name: hub, key: token}}",
        "{secretKeyRef: {name: hub, key: token, optional: true}}",
        "{configMapKeyRef: {name: settings, key: a.b}}",
        "{fieldRef: {fieldPath: status.hostIP}}",
    ],
)
def test_a_reference_is_kept_as_written(source: str) -> None:
    (variable,) = service(f"{{env: [{{name: HF_TOKEN, valueFrom: {source}}}]}}").spec.engine.env
    (again,) = service(f"{{env: [{variable.dump()}]}}".replace("True", "true")).spec.engine.env
    assert again == variable
    assert variable.value_from is not None


@pytest.mark.parametrize(
    ("variable", "rule"),
    [
        (
            "{name: A, value: x, valueFrom: {fieldRef: {fieldPath: status.hostIP}}}",
            "has both value and valueFrom: write one of them",
        ),
        ("{name: A, valueFrom: {}}", "needs exactly one of secretKeyRef, configMapKeyRef and fieldRef"),
        (
            "{name: A, valueFrom: {secretKeyRef: {name: a, key: b}, fieldRef: {fieldPath: status.hostIP}}}",
            "needs exactly one of secretKeyRef, configMapKeyRef and fieldRef",
        ),
    ],
)
def test_a_variable_has_one_source(variable: str, rule: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        service(f"{{env: [{variable}]}}")
    assert refused.value.rule == rule
