"""Manifests are parsed into objects; an invalid one is refused in one line with path, value and rule."""

import pytest

from fulcrum_core.api import (
    Bounds,
    ObjectMeta,
    PDAssignment,
    PDService,
    PDServiceSpec,
    PoolSpec,
    QoSTier,
    ServiceSloSpec,
    load_manifest,
)
from fulcrum_core.api.meta import NAME_PATTERN
from fulcrum_core.errors import InvalidInput
from fulcrum_core.values import AutoscalingMode

HEAD = "apiVersion: fulcrum.dev/v1alpha1\nkind: PDService\nmetadata: {name: chat}\n"
ROLE = "spec: {service: chat, roles: {chat-0: {role: Prefill, since: 2026-01-01T00:00:00Z, by: Person}}}"


def refusal(text: str) -> str:
    with pytest.raises(InvalidInput) as refused:
        load_manifest(text, source="chat.yaml")
    return str(refused.value)


def test_six_line_manifest_is_a_service() -> None:
    text = HEAD.replace("{name: chat}", "\n  name: chat") + "spec:\n  model: m\n  instances: 8\n"
    expected = PDService(metadata=ObjectMeta(name="chat"), spec=PDServiceSpec(model="m", instances=8))
    assert load_manifest(text, source="chat.yaml") == (expected,)


def test_several_documents_are_several_objects_and_empty_ones_are_skipped() -> None:
    tier_head = HEAD.replace("PDService", "QoSTier")
    text = f"---\n{HEAD}spec: {{model: m}}\n---\n---\n{tier_head}spec: {{priority: 3}}"
    service, tier = load_manifest(text, source="chat.yaml")
    assert isinstance(service, PDService)
    assert isinstance(tier, QoSTier)
    assert tier.spec.priority == 3


def test_pools_and_durations_are_read_as_written() -> None:
    text = (
        HEAD + "spec: {model: m, slo: {ttft: 1m30s, tpot: 12.5ms}, pools: [{name: a, instances: {min: 2}}]}"
    )
    (service,) = load_manifest(text, source="chat.yaml")
    pools = (PoolSpec(name="a", instances=Bounds(min=2)),)
    assert service == PDService(
        metadata=ObjectMeta(name="chat"),
        spec=PDServiceSpec(model="m", slo=ServiceSloSpec(ttft=90.0, tpot=0.0125), pools=pools),
    )


def test_unquoted_off_is_refused_with_a_hint_to_quote_it() -> None:
    (service,) = load_manifest(HEAD + "spec: {model: m, autoscaling: {mode: 'Off'}}", source="chat.yaml")
    assert isinstance(service, PDService)
    assert service.spec.autoscaling.mode is AutoscalingMode.OFF
    with pytest.raises(InvalidInput) as refused:
        load_manifest(HEAD + "spec: {model: m, autoscaling: {mode: Off}}", source="chat.yaml")
    assert str(refused.value) == (
        "chat.yaml[0]: spec.autoscaling.mode (false) is not one of 'Off', 'Advise' or 'Auto'; "
        'without quotes YAML reads Off as false: write "Off"'
    )


def test_duration_without_unit_is_refused_with_the_units() -> None:
    with pytest.raises(InvalidInput) as refused:
        load_manifest(HEAD + "spec: {model: m, slo: {ttft: 2}}", source="chat.yaml")
    assert str(refused.value) == "chat.yaml[0]: spec.slo.ttft (2) has no unit: write 2s, 2m or 2ms"


def test_null_field_equals_a_missing_field() -> None:
    (service,) = load_manifest(HEAD + "spec: {model: m, slo: null, drain: {timeout: }}", source="chat.yaml")
    (other,) = load_manifest(HEAD + "spec: {model: m}", source="chat.yaml")
    assert service == other


def test_unquoted_time_is_accepted() -> None:
    (assignment,) = load_manifest(HEAD.replace("PDService", "PDAssignment") + ROLE, source="chat.yaml")
    assert isinstance(assignment, PDAssignment)
    assert assignment.spec.roles["chat-0"].since == 1767225600.0


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        pytest.param("{model: m, x: 1}", "spec.x (1) is not a field", id="an unknown field"),
        pytest.param(
            "{model: m, qos_tiers: []}",
            "spec.qos_tiers ([]) is not a field; did you mean qosTiers?",
            id="a field in snake case",
        ),
        pytest.param(
            "{modle: m}",
            "spec.modle (m) is not a field; did you mean model?",
            id="a misspelt required field",
        ),
        pytest.param(
            "{model: m, pools: [{name: a, instances: {min: 1, mx: 2}}]}",
            "spec.pools[0].instances.mx (2) is not a field; did you mean max?",
            id="a misspelt field of a pool",
        ),
        pytest.param(
            "{model: m, pools: [{name: a, instances: {min: 1}, hardware: {resource: cpu, cont: 2}}]}",
            "spec.pools[0].hardware.cont (2) is not a field; did you mean count?",
            id="a misspelt field of an optional object",
        ),
        pytest.param("{}", "spec.model (nothing) is required", id="no model"),
        pytest.param("", "spec (nothing) is required", id="no spec"),
        pytest.param("{model: 5}", "spec.model (5) is not text", id="a number instead of text"),
        pytest.param("{model: m, instances: 0}", "spec.instances (0) is less than 1", id="no instance"),
        pytest.param(
            "{model: m, instances: 2000}", "spec.instances (2000) is greater than 1024", id="too many"
        ),
        pytest.param("{model: m, instances: '3'}", "spec.instances (3) is not a whole number", id="text"),
        pytest.param(
            "{model: m, instances: true}", "spec.instances (true) is not a whole number", id="a boolean"
        ),
        pytest.param(
            "{model: m, pools: [{name: a, instances: {min: 5, max: 4}}]}",
            "spec.pools[0].instances ({min: 5, max: 4}) min (5) is greater than max (4)",
            id="min above max",
        ),
        pytest.param(
            "{model: m, pools: [{name: a, instances: 2}]}",
            "spec.pools[0].instances (2) is {min, max}: write {min: 2}",
            id="a number of instances in a pool",
        ),
        pytest.param(
            "{model: m, pools: [{name: a}]}",
            "spec.pools[0].instances (nothing) is required",
            id="a pool without instances",
        ),
        pytest.param(
            "{model: m, instances: 2, pools: [{name: a, instances: {min: 1}}]}",
            "spec ({model: m, instances: 2, pools: [{name: a, instances: {min: 1}}]}) "
            "has both instances and pools: write one of them",
            id="instances and pools",
        ),
        pytest.param(
            "{model: m, slo: {ttft: 0s}}", "spec.slo.ttft (0.0) is not greater than 0", id="an SLO of zero"
        ),
        pytest.param(
            "{model: m, slo: {ttft: .nan}}",
            "spec.slo.ttft (.nan) is not a duration such as 1s, 50ms or 1h30m",
            id="not a number",
        ),
        pytest.param(
            "{model: m, slo: {ttft: .inf}}",
            "spec.slo.ttft (.inf) is not a duration such as 1s, 50ms or 1h30m",
            id="infinity",
        ),
        pytest.param(
            "{model: m, autoscaling: {mode: Maybe}}",
            "spec.autoscaling.mode (Maybe) is not one of 'Off', 'Advise' or 'Auto'",
            id="an unknown mode",
        ),
        pytest.param(
            "{model: m, engine: {type: TGI}}",
            "spec.engine.type (TGI) is not one of 'Simulated' or 'vLLM'",
            id="an unknown engine",
        ),
        pytest.param(
            "{model: m, autoscaling: {arrow: {shrink: 2.0}}}",
            "spec.autoscaling.arrow ({shrink: 2.0}) shrink (2) is greater than expand (1)",
            id="thresholds in the wrong order",
        ),
    ],
)
def test_invalid_spec_is_refused_in_one_line_with_path_value_and_rule(spec: str, line: str) -> None:
    assert refusal(f"{HEAD}spec: {spec}\n") == f"chat.yaml[0]: {line}"


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        pytest.param(
            "{sheddable: 1}", "spec.sheddable (1) is neither true nor false", id="sheddable as a number"
        ),
        pytest.param(
            "{admission: {mode: Shed}}",
            "spec.admission.mode (Shed) is not one of 'Reject', 'Queue' or 'Degrade'",
            id="an unknown mode",
        ),
        pytest.param(
            "{admission: {mode: Queue, maxQueueTime: 0s}}",
            "spec.admission.maxQueueTime (0s) is not greater than 0",
            id="no time to wait",
        ),
        pytest.param(
            "{admission: {mode: Queue, maxQueueTime: -5s}}",
            "spec.admission.maxQueueTime (-5s) is not a duration such as 1s, 50ms or 1h30m",
            id="a negative time",
        ),
        pytest.param(
            "{admission: {mode: Degrade, maxOutputTokens: 0}}",
            "spec.admission.maxOutputTokens (0) is less than 1",
            id="no output",
        ),
        pytest.param(
            "{admission: {mode: Degrade}}",
            "spec.admission ({mode: Degrade}) has mode Degrade without maxOutputTokens: write it",
            id="Degrade without a limit",
        ),
        pytest.param(
            "{admission: {maxOutputTokens: 5}}",
            "spec.admission ({maxOutputTokens: 5}) has maxOutputTokens, which has no effect: it needs "
            "mode Degrade",
            id="a limit without Degrade",
        ),
        pytest.param(
            "{reclaimWithin: 5s}",
            "spec ({reclaimWithin: 5s}) has reclaimWithin, which has no effect: it needs a reservedFraction "
            "above 0",
            id="a time to reclaim nothing",
        ),
        pytest.param(
            "{slo: {ttft: 1s}, sloFactor: 2}",
            "spec ({slo: {ttft: 1s}, sloFactor: 2}) has slo and sloFactor: write one of them",
            id="objectives of its own and those of the service",
        ),
        pytest.param("{sloFactor: 0}", "spec.sloFactor (0) is not greater than 0", id="no time at all"),
        pytest.param("{weight: -1}", "spec.weight (-1) is less than 1", id="a negative weight"),
        pytest.param(
            "{reservedFraction: 1.5}", "spec.reservedFraction (1.5) is greater than 1", id="a reserve over 1"
        ),
        pytest.param(
            "{reservedFraction: -0.5}", "spec.reservedFraction (-0.5) is less than 0", id="a negative reserve"
        ),
        pytest.param("{weight: heavy}", "spec.weight (heavy) is not a whole number", id="a weight in words"),
        pytest.param(
            "{rateLimit: {tokensPerMinute: 0}}",
            "spec.rateLimit.tokensPerMinute (0) is less than 1000",
            id="no tokens",
        ),
        pytest.param(
            "{rateLimit: {tokensPerMinute: -5}}",
            "spec.rateLimit.tokensPerMinute (-5) is less than 1000",
            id="a negative limit",
        ),
        pytest.param(
            "{rateLimit: {tokensPerMinute: 20}}",
            "spec.rateLimit.tokensPerMinute (20) is less than 1000",
            id="a limit below one request",
        ),
        pytest.param(
            "{rateLimit: {}}",
            "spec.rateLimit.tokensPerMinute (nothing) is required",
            id="a limit without a number",
        ),
        pytest.param(
            "{admission: {maxQueueTime: 5s}}",
            "spec.admission ({maxQueueTime: 5s}) has maxQueueTime, which has no effect: it needs mode Queue",
            id="a time without Queue",
        ),
    ],
)
def test_an_invalid_tier_is_refused_in_one_line(spec: str, line: str) -> None:
    head = HEAD.replace("PDService", "QoSTier")
    assert refusal(f"{head}spec: {spec}\n") == f"chat.yaml[0]: {line}"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        pytest.param("", "chat.yaml (empty) holds no object", id="nothing"),
        pytest.param(
            "a: [",
            "chat.yaml (YAML line 1) expected the node content, but found '<stream end>'",
            id="truncated",
        ),
        pytest.param(
            "? {a: 1}\n: 2", "chat.yaml (YAML line 1) found unhashable key", id="an object as a key"
        ),
        pytest.param("\0", "chat.yaml (YAML) cannot be read", id="a control character"),
        pytest.param("[" * 5000, "chat.yaml (YAML) is nested too deeply", id="nested too deeply"),
        pytest.param(
            "a: !!bool x",
            "chat.yaml (YAML) has a value that is not of its type, or a number of thousands of digits",
            id="a tag that does not fit",
        ),
        pytest.param(
            HEAD + "spec: {model: m}\nspec: {model: n}",
            "chat.yaml (YAML line 5) spec is written twice",
            id="a repeated key",
        ),
        pytest.param(
            "- 1",
            "chat.yaml[0]: manifest ([1]) is not an object with apiVersion, kind, metadata and spec",
            id="list",
        ),
        pytest.param(
            "kind: Pod",
            "chat.yaml[0]: kind (Pod) is not one of PDService, PDPool, PDInstance, PDAssignment, QoSTier",
            id="a kind that is not ours",
        ),
        pytest.param("kind: [PDService]", "", id="a kind that is a list"),
        pytest.param("kind: PDService", "chat.yaml[0]: apiVersion (nothing) is required", id="no version"),
        pytest.param(
            HEAD.replace("v1alpha1", "v2"),
            "chat.yaml[0]: apiVersion (fulcrum.dev/v2) is not 'fulcrum.dev/v1alpha1'",
            id="another version",
        ),
        pytest.param(
            HEAD.replace("{name: chat}", "{name: chat, label: x}"),
            "chat.yaml[0]: metadata.label (x) is not a field; did you mean labels?",
            id="a misspelt field of metadata",
        ),
        pytest.param(
            HEAD.replace("{name: chat}", "{name: Chat_1}") + "spec: {model: m}",
            f"chat.yaml[0]: metadata.name (Chat_1) does not match {NAME_PATTERN}",
            id="an invalid name",
        ),
    ],
)
def test_invalid_manifest_text_is_refused_in_one_line(text: str, line: str) -> None:
    message = refusal(text)
    assert "\n" not in message
    assert message == line or not line


def test_error_names_the_index_of_the_document() -> None:
    text = f"{HEAD}spec: {{model: m}}\n---\n{HEAD}spec: {{}}\n"
    assert refusal(text) == "chat.yaml[1]: spec.model (nothing) is required"


def test_long_value_is_shortened() -> None:
    message = refusal(f"{HEAD}spec: {{model: m, instances: {'x' * 500}}}")
    assert message == f"chat.yaml[0]: spec.instances ({'x' * 77}...) is not a whole number"
