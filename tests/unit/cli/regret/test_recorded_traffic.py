"""Pages of recorded requests: what is replayed, what counts as met, and what is rejected."""

import json
from pathlib import Path
from typing import Any

import pytest

from fulcrum_cli.regret.alternatives import RanAs
from fulcrum_cli.regret.recorded_traffic import add_spec, parse_page, read_file
from fulcrum_core.api.pdservice import PDServiceSpec
from fulcrum_core.api.router import DispatchSpec, RouterSpec
from fulcrum_core.errors import InvalidInput
from fulcrum_core.values import AutoscalingMode, DispatchMode
from fulcrum_simulator.fleet.options import PolicyName

FIELDS = ("arrival_s", "prompt_tokens", "output_tokens", "ttft_s", "duration_s", "tier", "outcome", "tenant")
OUTCOMES = ("ok", "invalid", "failed", "cancelled")
OK, INVALID, FAILED, CANCELLED = range(4)


def request(number: int, *, outcome: float = OK, output: int = 11, **changes: Any) -> list[Any]:
    """A request that takes 0.5 s to the first token and 0.05 s for each other one."""
    values = {
        "arrival_s": 1_000.0 + number,
        "prompt_tokens": 100 + number,
        "output_tokens": output,
        "ttft_s": 0.5,
        "duration_s": 1.0,
        "tier": 0,
        "outcome": outcome,
        "tenant": 0,
    } | changes
    return [values[name] for name in FIELDS]


def page(*requests: list[Any], **changes: Any) -> dict[str, Any]:
    return {
        "service": "chat",
        "slo": {"ttft_s": 0.5, "tpot_s": 0.06},
        "prefill_instances": 2,
        "decode_instances": 3,
        "outcomes": list(OUTCOMES),
        "fields": list(FIELDS),
        "requests": list(requests),
    } | changes


def ok_requests(count: int = 20) -> list[list[Any]]:
    return [request(number) for number in range(count)]


def test_arrivals_count_from_the_first_one_and_are_in_order() -> None:
    traffic = parse_page(page(*reversed(ok_requests())), "page")
    arrivals = [(each.arrival_s, each.input_tokens) for each in traffic.requests[:3]]
    assert arrivals == [(0.0, 100), (1.0, 101), (2.0, 102)]


@pytest.mark.parametrize(
    ("changed", "attainment"),
    [
        pytest.param({}, 1.0, id="both objectives met"),
        pytest.param({"ttft_s": 0.6}, 20 / 21, id="the first token was late"),
        pytest.param({"duration_s": 1.2}, 20 / 21, id="the others were late"),
        pytest.param({"ttft_s": None, "duration_s": 1.1}, 1.0, id="a whole response on time"),
        pytest.param({"ttft_s": None, "duration_s": 1.2}, 20 / 21, id="a late whole response"),
        pytest.param({"outcome": FAILED}, 20 / 21, id="failed"),
        pytest.param({"outcome": CANCELLED, "duration_s": 9.0}, 1.0, id="cancelled: not judged"),
    ],
)
def test_attainment_is_counted_as_the_router_does(changed: dict[str, Any], attainment: float) -> None:
    traffic = parse_page(page(*ok_requests(), request(20, **changed)), "page")
    assert traffic.attainment == pytest.approx(attainment)
    assert len(traffic.requests) == 21


def test_invalid_requests_are_no_load() -> None:
    assert len(parse_page(page(*ok_requests(), request(20, outcome=INVALID)), "page").requests) == 20


def test_requests_that_did_not_end_get_the_median_length() -> None:
    requests = [request(number, output=10 * number + 1) for number in range(20)]
    traffic = parse_page(page(*requests, request(20, outcome=FAILED, output=0)), "page")
    assert (traffic.requests[-1].output_tokens, traffic.guessed_outputs) == (96, 1)


@pytest.mark.parametrize(
    ("autoscaling", "policy"),
    [
        ({"policy": "balanced"}, PolicyName.BALANCED),
        ({"policy": "arrow"}, PolicyName.ARROW),
        ({"mode": "Advise"}, PolicyName.STATIC),
        ({"flip": {"paused": True}}, PolicyName.STATIC),
    ],
)
def test_the_policy_is_that_of_the_service(autoscaling: dict[str, Any], policy: PolicyName) -> None:
    spec = PDServiceSpec.model_validate({"model": "m", "instances": 5, "autoscaling": autoscaling})
    ran_as = parse_page(add_spec(page(*ok_requests()), spec), "page").ran_as
    assert (ran_as.policy, ran_as.prefill, ran_as.instances) == (policy, 2, 5)
    alternatives = list(ran_as.list_alternatives())
    assert alternatives[0].policies[0].name is policy
    assert {each.instances for each in alternatives} == {4, 5, 6, 7}


def test_no_alternative_has_more_instances_than_can_be_simulated() -> None:
    ran_as = parse_page(page(*ok_requests(), prefill_instances=1020), "page").ran_as
    assert {each.instances for each in ran_as.list_alternatives()} == {1022, 1023, 1024}


@pytest.mark.parametrize("autoscaling", [{"mode": "Advise"}, {"mode": "Off"}, {"flip": {"paused": True}}])
def test_policies_flip_in_the_comparison_though_the_service_does_not(autoscaling: dict[str, Any]) -> None:
    spec = PDServiceSpec.model_validate({"model": "m", "instances": 5, "autoscaling": autoscaling})
    compared = parse_page(add_spec(page(*ok_requests()), spec), "page").ran_as.spec.autoscaling
    assert (compared.mode, compared.flip.paused) == (AutoscalingMode.AUTO, False)


@pytest.mark.parametrize("deflect", [False, True])
def test_the_alternatives_deflect_as_the_service_does_and_one_does_not(*, deflect: bool) -> None:
    spec = PDServiceSpec(model="m", instances=4, router=RouterSpec(dispatch=DispatchSpec(deflect=deflect)))
    ran_as = RanAs(spec=spec, policy=PolicyName.ARROW, prefill=2, instances=4)
    switched = [each.policies[0].deflects is not deflect for each in ran_as.list_alternatives()]
    assert switched == [False, False, False, True, False, False, False]


def test_a_service_with_mode_direct_is_compared_with_mode_queue() -> None:
    spec = PDServiceSpec(
        model="m", instances=4, router=RouterSpec(dispatch=DispatchSpec(mode=DispatchMode.DIRECT))
    )
    ran_as = RanAs(spec=spec, policy=PolicyName.ARROW, prefill=2, instances=4)
    queued = [each.policies[0].dispatch is DispatchMode.QUEUE for each in ran_as.list_alternatives()]
    assert queued == [False, False, False, True, False, False, False, False]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        pytest.param([], "page (the document) is not as in the page /requests", id="a list"),
        pytest.param(page(slo={"ttft_s": 0}), "page (slo.ttft_s) is not as in the page", id="no objective"),
        pytest.param(page(fields=["arrival_s"]), "page (requests) are not those of a router", id="fields"),
        pytest.param(
            page(request(0, outcome=9)),
            "page (requests) are not those of a router: outcome 9 is not below 4, the number of outcomes",
            id="outcome",
        ),
        pytest.param(
            page(request(0, outcome=1e300)),
            "page (requests) are not those of a router: outcome 1e+300 is not below 4",
            id="a large outcome",
        ),
        pytest.param(
            page([1.0, 2.0]),
            "page (requests) are not those of a router: a request has 2 values for 8 fields",
            id="a short request",
        ),
        pytest.param(
            page(fields=["arrival_s"]),
            "page (requests) are not those of a router: the field prompt_tokens is missing",
            id="a missing field",
        ),
        pytest.param(
            page(*ok_requests(), request(20, prompt_tokens=1e300)),
            "page (requests) are not those of a router: prompt_tokens 1e+300 is above 1e+07",
            id="a prompt without an end",
        ),
        pytest.param(
            page(*ok_requests(), request(20, duration_s=1e308)),
            "page (requests) are not those of a router: duration_s 1e+308 is above 3.16224e+07",
            id="a response without an end",
        ),
        pytest.param(
            page(*ok_requests(), request(20, arrival_s=1e12)),
            "page (requests) are not those of a router: arrivals 1e+12 s apart are above 7200",
            id="arrivals far apart",
        ),
        pytest.param(page(service=""), "page (service) is not as in the page", id="no name"),
        pytest.param(page(service="a" * 254), "page (service) is not as in the page", id="a long name"),
        pytest.param(
            page(service="a\x1b[2Jb"), "page (service) is not as in the page", id="control characters"
        ),
        pytest.param(
            page(spec={"model": "m", "a\nb" * 40: 1}), "page (spec.a ba ba b", id="a field of several lines"
        ),
        pytest.param(page(service="a\nb"), "page (service) is not as in the page", id="two lines"),
        *(
            pytest.param(
                page(slo={"ttft_s": ttft_s, "tpot_s": 1}), "page (slo.ttft_s) is not as in", id=f"{ttft_s} s"
            )
            for ttft_s in (float("inf"), float("nan"), 1e308)
        ),
        pytest.param(
            page(*ok_requests(), prefill_instances=5000),
            "page (5003 serving instances) must have at most 1024",
            id="too many instances",
        ),
        pytest.param(page(request(0, arrival_s=None)), "page (requests) are not those of", id="no time"),
        pytest.param(
            page(request(0, output_tokens=-1)), "page (requests.0.2)", id="a negative number of tokens"
        ),
        pytest.param(page(request(0, arrival_s=float("inf"))), "page (requests.0.0)", id="no finite time"),
        pytest.param(
            page(request(0)), "page (1 request recorded) must have at least 20 for a replay", id="one request"
        ),
        pytest.param(page(), "page (0 requests recorded) must have at least 20 for a replay", id="none"),
        pytest.param(
            page(*ok_requests(), decode_instances=0, prefill_instances=1),
            "page (1 serving instance) must have at least 2 for a split",
            id="one instance",
        ),
    ],
)
def test_other_documents_are_rejected_in_one_line(document: Any, message: str) -> None:
    with pytest.raises(InvalidInput) as error:
        parse_page(document, "page")
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_json_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "requests.json"
    file.write_text("{", encoding="utf-8")
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_file(file)
    file.write_text(json.dumps(page()), encoding="utf-8")
    assert read_file(file) == page()


def test_a_file_that_is_longer_than_any_page_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fulcrum_cli.regret.recorded_traffic.PAGE_BYTES_MAX", 100)
    file = tmp_path / "requests.json"
    file.write_text(" " * 101, encoding="utf-8")
    with pytest.raises(InvalidInput, match=r"cannot be read: it has more than 100 bytes"):
        read_file(file)
