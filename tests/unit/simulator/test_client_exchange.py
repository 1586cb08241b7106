"""Every request has exactly one outcome: ok, failed, broken or wrong."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulcrum_core.values import Slo
from fulcrum_simulator.client.exchange import HttpExchange
from fulcrum_simulator.client.outcomes import (
    Latencies,
    LoadOutcome,
    LoadResults,
    OutcomeKind,
    summarize_latencies,
)
from fulcrum_simulator.client.prompts import (
    CHAT_TOKENS_MIN,
    PreparedRequest,
    prepare_request,
    prepare_token_request,
)
from fulcrum_simulator.percentile import percentile
from fulcrum_simulator.text import BYTES_PER_TOKEN, count_tokens, output_token, prompt_digest, render_chat
from fulcrum_simulator.workload import WorkloadRequest

INPUT, OUTPUT = 30, 3


def make_request(*, chat: bool = False, output_tokens: int = OUTPUT) -> PreparedRequest:
    request = WorkloadRequest(0.0, INPUT, output_tokens)
    return prepare_request(request, model="m", seed=1, index=4, chat=chat)


def expected_digest() -> bytes:
    digest = make_request().digest
    assert digest is not None
    return digest


def event(payload: object) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def token(index: int, digest: bytes | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": output_token(digest or expected_digest(), index)}]})


def usage(prompt: int = INPUT, completion: int = OUTPUT) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}})


DONE = b"data: [DONE]\n\n"
ERROR = event({"error": {"message": "decode leg died", "type": "upstream_error", "code": 502}})
OTHER_PROMPT = prompt_digest(b"another prompt")


@dataclass
class ScriptedResponse:
    """Feeds a scripted response to one exchange, one piece per second, and collects the outcomes."""

    pieces: Sequence[bytes]
    status: int = 200
    complete: bool = True
    request: PreparedRequest = field(default_factory=make_request)
    degraded_tokens: int = 0

    def outcomes(self) -> list[LoadOutcome]:
        ends: list[LoadOutcome] = []
        exchange = HttpExchange(
            self.request,
            index=4,
            intended_s=100.0,
            on_end=ends.append,
            degraded_tokens=self.degraded_tokens,
        )
        exchange.on_sent(100.5)
        exchange.on_status(self.status)
        now_s = 100.0
        for piece in self.pieces:
            now_s += 1.0
            exchange.on_body(piece, now_s)
        if self.complete:
            exchange.on_complete(now_s)
        exchange.on_lost("connection closed", now_s)
        return ends


def test_a_correct_response_is_ok_with_latencies_from_the_intended_time() -> None:
    assert ScriptedResponse([token(0), token(1), token(2), usage() + DONE]).outcomes() == [
        LoadOutcome(4, OutcomeKind.OK, 0.5, 104.0, INPUT, output_tokens=3, ttft_s=1.0, tpot_s=1.0)
    ]


def test_tpot_counts_tokens_and_not_events() -> None:
    """An engine may send several tokens in one event."""
    digest = expected_digest()
    both = event({"choices": [{"index": 0, "text": output_token(digest, 1) + output_token(digest, 2)}]})
    assert ScriptedResponse([token(0), both, usage() + DONE]).outcomes() == [
        LoadOutcome(4, OutcomeKind.OK, 0.5, 103.0, INPUT, output_tokens=3, ttft_s=1.0, tpot_s=0.5)
    ]


def test_a_single_token_has_no_tpot() -> None:
    ends: list[LoadOutcome] = []
    exchange = HttpExchange(make_request(output_tokens=1), index=0, intended_s=0.0, on_end=ends.append)
    exchange.on_status(200)
    exchange.on_body(token(0) + DONE, 2.0)
    exchange.on_complete(2.0)
    assert ends == [LoadOutcome(0, OutcomeKind.OK, 0.0, 2.0, INPUT, output_tokens=1, ttft_s=2.0, tpot_s=None)]


RESPONSE = token(0) + token(1) + token(2) + usage() + DONE


def test_prompts_begin_alike_as_far_as_their_block_ids_do() -> None:
    requests = [
        WorkloadRequest(0.0, tokens, OUTPUT, prefix_hash_ids=ids)
        for tokens, ids in ((40, (1, 2, 3)), (40, (1, 2, 4)), (20, (1, 2)))
    ]

    def write(block_tokens: int) -> list[str]:
        made = (
            prepare_request(one, model="m", seed=1, index=n, block_tokens=block_tokens)
            for n, one in enumerate(requests)
        )
        return [json.loads(one.body)["prompt"] for one in made]

    def count_common(first: str, second: str) -> int:
        pairs = enumerate(zip(first, second, strict=False))
        return next((n for n, (a, b) in pairs if a != b), min(len(first), len(second))) // BYTES_PER_TOKEN

    one, other, short = write(16)
    assert [len(text) // BYTES_PER_TOKEN for text in (one, other, short)] == [40, 40, 20]
    assert (count_common(one, other), count_common(one, short)) == (32, 20)
    one, other, _ = write(0)
    assert count_common(one, other) == 0


@pytest.mark.parametrize(
    ("expected", "told", "tokens", "kind"),
    [
        pytest.param(2, 2, 2, OutcomeKind.OK, id="as expected and told"),
        pytest.param(2, 2, 1, OutcomeKind.WRONG, id="shorter than that"),
        pytest.param(2, 1, 1, OutcomeKind.WRONG, id="another limit is told"),
        pytest.param(2, None, 2, OutcomeKind.WRONG, id="not told"),
        pytest.param(0, 2, 2, OutcomeKind.WRONG, id="nobody expects a limit"),
        pytest.param(9, 9, 3, OutcomeKind.OK, id="a limit above what was asked for"),
    ],
)
def test_an_answer_that_admission_limited_is_right_if_it_was_expected_and_told(
    expected: int, told: int | None, tokens: int, kind: OutcomeKind
) -> None:
    counts = {"prompt_tokens": INPUT, "completion_tokens": tokens, "degraded_max_tokens": told}
    pieces = [*map(token, range(tokens)), event({"choices": [], "usage": counts}), DONE]
    (outcome,) = ScriptedResponse(pieces, degraded_tokens=expected).outcomes()
    assert (outcome.kind, outcome.output_tokens) == (kind, tokens)


@pytest.mark.parametrize(("value", "seconds"), [(b"7", 7), (b"soon", 0)])
def test_a_refused_request_knows_when_it_may_come_back(value: bytes, seconds: int) -> None:
    ends: list[LoadOutcome] = []
    exchange = HttpExchange(make_request(), index=0, intended_s=0.0, on_end=ends.append)
    exchange.on_status(429)
    exchange.on_retry_after(value)
    exchange.on_complete(1.0)
    assert [(one.kind, one.retry_after_s) for one in ends] == [(OutcomeKind.REFUSED, seconds)]


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_a_response_may_arrive_in_pieces_of_any_size(size: int) -> None:
    pieces = [RESPONSE[at : at + size] for at in range(0, len(RESPONSE), size)]
    assert [outcome.kind for outcome in ScriptedResponse(pieces).outcomes()] == [OutcomeKind.OK]


@pytest.mark.parametrize(
    ("scripted", "kind", "reason", "error_reported"),
    [
        pytest.param(
            ScriptedResponse([b"busy"], status=503), OutcomeKind.FAILED, "status 503", False, id="a refusal"
        ),
        pytest.param(
            ScriptedResponse([b"later"], status=429), OutcomeKind.REFUSED, "", False, id="admission refuses"
        ),
        pytest.param(
            ScriptedResponse([], complete=False),
            OutcomeKind.FAILED,
            "connection closed",
            False,
            id="a cut before any byte",
        ),
        pytest.param(
            ScriptedResponse([ERROR]),
            OutcomeKind.FAILED,
            "decode leg died",
            False,
            id="an error event before any text",
        ),
        pytest.param(
            ScriptedResponse([token(0), ERROR], complete=False),
            OutcomeKind.BROKEN,
            "decode leg died",
            True,
            id="an announced break",
        ),
        pytest.param(
            ScriptedResponse([token(0)], complete=False),
            OutcomeKind.BROKEN,
            "connection closed",
            False,
            id="a silent break",
        ),
        pytest.param(
            ScriptedResponse([token(0)]),
            OutcomeKind.BROKEN,
            "ended without [DONE]",
            False,
            id="a clean end without DONE",
        ),
        pytest.param(
            ScriptedResponse([token(0), token(1, OTHER_PROMPT), token(2), DONE]),
            OutcomeKind.WRONG,
            "text differs",
            False,
            id="a wrong token",
        ),
        pytest.param(
            ScriptedResponse([token(0), DONE]),
            OutcomeKind.WRONG,
            "token count differs",
            False,
            id="too few tokens",
        ),
        pytest.param(
            ScriptedResponse([token(0), token(1), token(2), token(2), DONE]),
            OutcomeKind.WRONG,
            "token count differs",
            False,
            id="too many tokens",
        ),
        pytest.param(
            ScriptedResponse([token(0), token(1), token(2), usage(prompt=29), DONE]),
            OutcomeKind.WRONG,
            "usage differs",
            False,
            id="usage that counts another prompt",
        ),
        pytest.param(
            ScriptedResponse([token(0, OTHER_PROMPT)], complete=False),
            OutcomeKind.WRONG,
            "text differs, then cut",
            False,
            id="wrong text that is then cut",
        ),
        pytest.param(
            ScriptedResponse([b"data: {\n\n"]),
            OutcomeKind.FAILED,
            "an event that is not JSON",
            False,
            id="an event that is not JSON",
        ),
    ],
)
def test_every_failure_has_one_outcome_and_one_reason(
    scripted: ScriptedResponse, kind: OutcomeKind, reason: str, error_reported: bool
) -> None:
    assert [(end.kind, end.reason, end.error_reported) for end in scripted.outcomes()] == [
        (kind, reason, error_reported)
    ]


pieces = st.sampled_from(
    [token(0), token(1), token(2), token(0, OTHER_PROMPT), usage(), usage(7), DONE, ERROR, b"data: x\n\n"]
)


@given(st.lists(pieces, max_size=6), st.sampled_from([200, 500]), st.booleans())
def test_every_response_gives_exactly_one_outcome(script: list[bytes], status: int, complete: bool) -> None:
    assert len(ScriptedResponse(script, status=status, complete=complete).outcomes()) == 1


@given(st.integers(1, 400), st.booleans(), st.integers(0, 9), st.integers(0, 9999))
def test_a_prompt_has_exactly_the_requested_tokens(tokens: int, chat: bool, seed: int, index: int) -> None:
    request = prepare_request(WorkloadRequest(0.0, tokens, 1), model="m", seed=seed, index=index, chat=chat)
    body = json.loads(request.body)
    prompt = render_chat(body["messages"]) if "messages" in body else body["prompt"].encode()
    assert (count_tokens(prompt), len(prompt)) == (tokens, tokens * 4)
    assert prompt_digest(prompt) == request.digest
    assert (
        ("messages" in body)
        == (request.path == "/v1/chat/completions")
        == (chat and tokens >= CHAT_TOKENS_MIN)
    )


def test_prompts_differ_from_their_first_block_on() -> None:
    prompts = {
        json.loads(prepare_request(WorkloadRequest(0.0, 16, 1), model="m", seed=seed, index=index).body)[
            "prompt"
        ]
        for seed in range(3)
        for index in range(200)
    }
    assert len(prompts) == 600


def make_outcome(
    end_s: float, ttft_s: float, tpot_s: float | None, kind: OutcomeKind = OutcomeKind.OK
) -> LoadOutcome:
    return LoadOutcome(0, kind, 0.0, end_s, output_tokens=2, ttft_s=ttft_s, tpot_s=tpot_s)


def test_attainment_counts_every_request_that_was_offered() -> None:
    results = LoadResults(Slo(ttft_s=1.0, tpot_s=0.1))
    ends = [
        make_outcome(1.0, 0.5, 0.05),
        make_outcome(2.0, 0.5, None),
        make_outcome(3.0, 1.5, 0.05),
        make_outcome(4.0, 0.5, 0.2),
        make_outcome(5.0, 0.5, 0.05, OutcomeKind.BROKEN),
    ]
    for _ in range(8):
        results.record_offered()
    for end in ends:
        results.record_outcome(end)
    report = results.report()
    assert report.attainment == 2 / 8
    assert (report.offered, report.ok, report.broken, report.in_flight, report.broken_silently) == (
        8,
        4,
        1,
        3,
        1,
    )
    assert list(results.since(3.0)) == ends[2:]
    assert LoadResults(Slo(1.0, 0.1)).report().attainment is None


def test_latencies_cover_only_successful_requests() -> None:
    ends = [make_outcome(0.0, float(n), None) for n in range(1, 101)] + [
        make_outcome(0.0, 999.0, 9.0, OutcomeKind.WRONG)
    ]
    assert summarize_latencies(ends) == Latencies(50.0, 99.0, None, None, ttft_mean_s=50.5)


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([], 50, None),
        ([3.0], 99, 3.0),
        ([2.0, 1.0], 50, 1.0),
        ([2.0, 1.0], 51, 2.0),
        ([1.0, 2.0, 3.0], 100, 3.0),
    ],
)
def test_a_percentile_is_a_value_that_occurred(
    values: list[float], percent: float, expected: float | None
) -> None:
    assert percentile(values, percent) == expected


# A real model


def make_token_request(index: int = 4) -> PreparedRequest:
    return prepare_token_request(WorkloadRequest(0.0, INPUT, OUTPUT), model="m", seed=1, index=index)


PART_OF_A_CHARACTER = event({"choices": [{"index": 0, "text": ""}]})
TEXT = event({"choices": [{"index": 0, "text": "any text"}]})


def test_tokens_of_a_real_model_count_whatever_their_text() -> None:
    pieces = [PART_OF_A_CHARACTER, TEXT, TEXT, usage() + DONE]
    assert ScriptedResponse(pieces, request=make_token_request()).outcomes() == [
        LoadOutcome(4, OutcomeKind.OK, 0.5, 104.0, INPUT, output_tokens=3, ttft_s=1.0, tpot_s=1.0)
    ]


@pytest.mark.parametrize(
    ("pieces", "kind", "reason"),
    [
        pytest.param([TEXT, usage(completion=1) + DONE], OutcomeKind.WRONG, "usage differs", id="too short"),
        pytest.param([TEXT, DONE], OutcomeKind.WRONG, "no usage", id="its tokens were not counted"),
        pytest.param([TEXT, ERROR], OutcomeKind.BROKEN, "decode leg died", id="an error after a token"),
        pytest.param([ERROR], OutcomeKind.FAILED, "decode leg died", id="an error before any token"),
    ],
)
def test_an_incomplete_response_of_a_real_model_is_not_ok(
    pieces: Sequence[bytes], kind: OutcomeKind, reason: str
) -> None:
    (outcome,) = ScriptedResponse(pieces, request=make_token_request()).outcomes()
    assert (outcome.kind, outcome.reason) == (kind, reason)


def test_prompts_of_token_ids_have_their_length_and_differ_from_the_first_block_on() -> None:
    first, second = (json.loads(make_token_request(index).body)["prompt"] for index in (0, 1))
    assert (len(first), len(second)) == (INPUT, INPUT)
    assert first[:16] != second[:16]
