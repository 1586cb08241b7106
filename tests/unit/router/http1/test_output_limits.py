"""Output tokens, choices and tokens per event that a request allows, by the fields of each API."""

from typing import Any

import pytest

from fulcrum_router.http1.output_limits import (
    count_choices,
    count_prompts,
    estimate_streamed_tokens,
    find_output_limit,
    find_passed_limit,
    find_tokens_per_event,
)


@pytest.mark.parametrize(
    ("fields", "chat", "limit"),
    [
        pytest.param({"max_tokens": 7}, False, 7, id="a completion's max_tokens"),
        pytest.param({}, False, 16, id="a completion without a limit gets vLLM's 16 tokens"),
        pytest.param({"max_completion_tokens": 7}, False, 16, id="max_completion_tokens is a field of chats"),
        pytest.param(
            {"max_tokens": 7, "max_completion_tokens": 5}, True, 5, id="max_completion_tokens first"
        ),
        pytest.param({"max_tokens": 7}, True, 7, id="a chat's max_tokens"),
        pytest.param({}, True, None, id="a chat without a limit may use the context"),
        pytest.param({"max_tokens": "many"}, True, None, id="text is no limit"),
        pytest.param({"max_tokens": True}, True, None, id="a boolean is no limit"),
    ],
)
def test_the_output_limit_is_read_as_vllm_does(
    fields: dict[str, Any], *, chat: bool, limit: int | None
) -> None:
    assert find_output_limit(fields, chat=chat) == limit


@pytest.mark.parametrize(
    ("path", "fields", "limit"),
    [
        pytest.param(b"/v1/responses", {"max_output_tokens": 7, "max_tokens": 9}, 7, id="responses"),
        pytest.param(b"/v1/messages", {"max_output_tokens": 7, "max_tokens": 9}, 9, id="messages"),
        pytest.param(b"/v1/responses", {}, None, id="the rest of the context"),
        pytest.param(b"/v1/messages", {"max_tokens": "9"}, None, id="text is no limit"),
    ],
)
def test_the_output_limit_of_other_apis_has_a_name_of_its_own(
    path: bytes, fields: dict[str, Any], limit: int | None
) -> None:
    assert find_passed_limit(fields, path=path) == limit


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [({}, 1), ({"stream_interval": None}, 1), ({"stream_interval": 8}, 8), ({"stream_interval": -1}, 1)],
    ids=["no interval", "null", "an interval", "an interval that the engine refuses"],
)
def test_a_client_may_ask_for_several_tokens_in_an_event(fields: dict[str, Any], tokens: int) -> None:
    assert find_tokens_per_event(fields) == tokens


@pytest.mark.parametrize(
    ("events", "tokens_per_event", "tokens"),
    [
        pytest.param(4, 1, 4, id="one token in each event"),
        pytest.param(4, 100, 400, id="several tokens in each event"),
        pytest.param(4, 1_000, 2_500, id="no more than the request may have"),
        pytest.param(2_502, 1_000, 2_502, id="no fewer than the events"),
    ],
)
def test_streamed_tokens_are_estimated_by_the_events(events: int, tokens_per_event: int, tokens: int) -> None:
    assert estimate_streamed_tokens(events, tokens_per_event=tokens_per_event, most=2_500) == tokens


@pytest.mark.parametrize(
    ("fields", "choices"),
    [
        pytest.param({"prompt": "a"}, 1, id="one"),
        pytest.param({"prompt": [1, 2, 3]}, 1, id="token ids are one prompt"),
        pytest.param({"prompt": []}, 1, id="no prompt"),
        pytest.param({"prompt": ["a", "b"]}, 2, id="two prompts"),
        pytest.param({"prompt": [[1], [2], [3]]}, 3, id="three prompts of ids"),
        pytest.param({"prompt": None, "prompt_embeds": "AA"}, 1, id="an embedded prompt"),
        pytest.param({"prompt_embeds": ["AA", "AA"]}, 2, id="two embedded prompts"),
        pytest.param({"prompt": "a", "prompt_embeds": ["AA", "AA"]}, 3, id="embedded prompts and a text"),
        pytest.param({"prompt": ["a", "b"], "n": 3}, 6, id="choices of each prompt"),
        pytest.param({"prompt": "a", "n": "x"}, 1, id="text is no number"),
    ],
)
def test_choices_are_counted_for_each_prompt(fields: dict[str, Any], choices: int) -> None:
    assert count_choices(fields) == choices
    assert choices % count_prompts(fields) == 0
