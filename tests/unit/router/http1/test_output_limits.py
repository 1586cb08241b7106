"""The output that a client's request allows."""

from typing import Any

import pytest

from fulcrum_router.http1.output_limits import count_choices, count_prompts, find_output_limit


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
    ("fields", "choices"),
    [
        pytest.param({"prompt": "a"}, 1, id="one"),
        pytest.param({"prompt": [1, 2, 3]}, 1, id="token ids are one prompt"),
        pytest.param({"prompt": []}, 1, id="no prompt"),
        pytest.param({"prompt": ["a", "b"]}, 2, id="two prompts"),
        pytest.param({"prompt": [[1], [2], [3]]}, 3, id="three prompts of ids"),
        pytest.param({"prompt": ["a", "b"], "n": 3}, 6, id="choices of each prompt"),
        pytest.param({"prompt": "a", "n": "x"}, 1, id="text is no number"),
    ],
)
def test_choices_are_counted_for_each_prompt(fields: dict[str, Any], choices: int) -> None:
    assert count_choices(fields) == choices
    assert choices % count_prompts(fields) == 0
