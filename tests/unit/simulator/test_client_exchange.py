"""Every request ends exactly once, as ok, failed, broken or wrong."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulcrum_core.values import Slo
from fulcrum_simulator.client.exchange import Exchange
from fulcrum_simulator.client.outcomes import Ending, Latencies, Outcome, Tally, latencies, percentile
from fulcrum_simulator.client.prompts import SHORTEST_CHAT_TOKENS, WrittenRequest, write_request
from fulcrum_simulator.text import count_tokens, output_token, prompt_digest, render_chat
from fulcrum_simulator.workload import WorkloadRequest

INPUT, OUTPUT = 30, 3


def written(*, chat: bool = False, output_tokens: int = OUTPUT) -> WrittenRequest:
    request = WorkloadRequest(0.0, INPUT, output_tokens)
    return write_request(request, model="m", seed=1, index=4, chat=chat)


def event(payload: object) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def token(index: int, digest: bytes | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": output_token(digest or written().digest, index)}]})


def usage(prompt: int = INPUT, completion: int = OUTPUT) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}})


DONE = b"data: [DONE]\n\n"
ERROR = event({"error": {"message": "decode leg died", "type": "upstream_error", "code": 502}})
OTHER = prompt_digest(b"another prompt")


@dataclass
class Wire:
    """Feeds one exchange, a byte string a second, and keeps what it ended as."""

    pieces: Sequence[bytes]
    status: int = 200
    complete: bool = True

    def outcomes(self) -> list[Outcome]:
        ends: list[Outcome] = []
        exchange = Exchange(written(), index=4, intended_s=100.0, ended=ends.append)
        exchange.sent(100.5)
        exchange.head(self.status)
        now_s = 100.0
        for piece in self.pieces:
            now_s += 1.0
            exchange.body(piece, now_s)
        if self.complete:
            exchange.complete(now_s)
        exchange.lost("connection closed", now_s)
        return ends


def test_a_right_answer_is_ok_with_latencies_from_the_intended_time() -> None:
    assert Wire([token(0), token(1), token(2), usage() + DONE]).outcomes() == [
        Outcome(4, Ending.OK, 0.5, 104.0, output_tokens=3, ttft_s=1.0, tpot_s=1.0)
    ]


def test_a_single_token_has_no_tpot() -> None:
    ends: list[Outcome] = []
    exchange = Exchange(written(output_tokens=1), index=0, intended_s=0.0, ended=ends.append)
    exchange.head(200)
    exchange.body(token(0) + DONE, 2.0)
    exchange.complete(2.0)
    assert ends == [Outcome(0, Ending.OK, 0.0, 2.0, output_tokens=1, ttft_s=2.0, tpot_s=None)]


ANSWER = token(0) + token(1) + token(2) + usage() + DONE


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_an_answer_may_come_in_pieces_of_any_size(size: int) -> None:
    pieces = [ANSWER[at : at + size] for at in range(0, len(ANSWER), size)]
    assert [outcome.ending for outcome in Wire(pieces).outcomes()] == [Ending.OK]


@pytest.mark.parametrize(
    ("wire", "ending", "reason", "told"),
    [
        pytest.param(Wire([b"busy"], status=503), Ending.FAILED, "status 503", False, id="a refusal"),
        pytest.param(
            Wire([], complete=False), Ending.FAILED, "connection closed", False, id="a cut before any byte"
        ),
        pytest.param(
            Wire([ERROR]), Ending.FAILED, "decode leg died", False, id="an error event before any text"
        ),
        pytest.param(
            Wire([token(0), ERROR], complete=False),
            Ending.BROKEN,
            "decode leg died",
            True,
            id="an announced break",
        ),
        pytest.param(
            Wire([token(0)], complete=False), Ending.BROKEN, "connection closed", False, id="a silent break"
        ),
        pytest.param(
            Wire([token(0)]), Ending.BROKEN, "ended without [DONE]", False, id="a clean end without DONE"
        ),
        pytest.param(
            Wire([token(0), token(1, OTHER), token(2), DONE]),
            Ending.WRONG,
            "text differs",
            False,
            id="a wrong token",
        ),
        pytest.param(Wire([token(0), DONE]), Ending.WRONG, "token count differs", False, id="too few tokens"),
        pytest.param(
            Wire([token(0), token(1), token(2), token(2), DONE]),
            Ending.WRONG,
            "token count differs",
            False,
            id="too many tokens",
        ),
        pytest.param(
            Wire([token(0), token(1), token(2), usage(prompt=29), DONE]),
            Ending.WRONG,
            "usage differs",
            False,
            id="usage that counts another prompt",
        ),
        pytest.param(
            Wire([token(0, OTHER)], complete=False),
            Ending.WRONG,
            "text differs, then cut",
            False,
            id="wrong text that is then cut",
        ),
        pytest.param(
            Wire([b"data: {\n\n"]),
            Ending.FAILED,
            "an event that is not JSON",
            False,
            id="an event that is no JSON",
        ),
    ],
)
def test_what_went_wrong_is_named_once(wire: Wire, ending: Ending, reason: str, told: bool) -> None:
    assert [(end.ending, end.reason, end.told) for end in wire.outcomes()] == [(ending, reason, told)]


pieces = st.sampled_from(
    [token(0), token(1), token(2), token(0, OTHER), usage(), usage(7), DONE, ERROR, b"data: x\n\n"]
)


@given(st.lists(pieces, max_size=6), st.sampled_from([200, 500]), st.booleans())
def test_whatever_comes_a_request_ends_once(script: list[bytes], status: int, complete: bool) -> None:
    assert len(Wire(script, status=status, complete=complete).outcomes()) == 1


@given(st.integers(1, 400), st.booleans(), st.integers(0, 9), st.integers(0, 9999))
def test_a_prompt_has_exactly_the_tokens_asked_for(tokens: int, chat: bool, seed: int, index: int) -> None:
    request = write_request(WorkloadRequest(0.0, tokens, 1), model="m", seed=seed, index=index, chat=chat)
    body = json.loads(request.body)
    prompt = render_chat(body["messages"]) if "messages" in body else body["prompt"].encode()
    assert (count_tokens(prompt), len(prompt)) == (tokens, tokens * 4)
    assert prompt_digest(prompt) == request.digest
    assert (
        ("messages" in body)
        == (request.path == "/v1/chat/completions")
        == (chat and tokens >= SHORTEST_CHAT_TOKENS)
    )


def test_prompts_differ_from_their_first_block_on() -> None:
    prompts = {
        json.loads(write_request(WorkloadRequest(0.0, 16, 1), model="m", seed=seed, index=index).body)[
            "prompt"
        ]
        for seed in range(3)
        for index in range(200)
    }
    assert len(prompts) == 600


def outcome(end_s: float, ttft_s: float, tpot_s: float | None, ending: Ending = Ending.OK) -> Outcome:
    return Outcome(0, ending, 0.0, end_s, output_tokens=2, ttft_s=ttft_s, tpot_s=tpot_s)


def test_attainment_counts_every_request_that_was_offered() -> None:
    tally = Tally(Slo(ttft_s=1.0, tpot_s=0.1))
    ends = [
        outcome(1.0, 0.5, 0.05),
        outcome(2.0, 0.5, None),
        outcome(3.0, 1.5, 0.05),
        outcome(4.0, 0.5, 0.2),
        outcome(5.0, 0.5, 0.05, Ending.BROKEN),
    ]
    for _ in range(8):
        tally.offer()
    for end in ends:
        tally.end(end)
    report = tally.report()
    assert report.attainment == 2 / 8
    assert (report.offered, report.ok, report.broken, report.in_flight, report.broken_silently) == (
        8,
        4,
        1,
        3,
        1,
    )
    assert list(tally.since(3.0)) == ends[2:]
    assert Tally(Slo(1.0, 0.1)).report().attainment is None


def test_percentiles_are_of_the_requests_that_ended_right() -> None:
    ends = [outcome(0.0, float(n), None) for n in range(1, 101)] + [outcome(0.0, 999.0, 9.0, Ending.WRONG)]
    assert latencies(ends) == Latencies(50.0, 99.0, None, None)


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
