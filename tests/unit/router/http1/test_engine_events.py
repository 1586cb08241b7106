"""The usage that is read from an engine's response: the last one, in any layout, if it is possible."""

import pytest

from fulcrum_router.http1.engine_events import Usage, parse_usage


@pytest.mark.parametrize(
    ("content", "usage"),
    [
        pytest.param(
            b'{"usage":{"prompt_tokens":9,"total_tokens":12,"completion_tokens":3,'
            b'"prompt_tokens_details":{"cached_tokens":8}}}',
            Usage(9, 8, 3),
            id="vLLM's",
        ),
        pytest.param(
            b'{"usage":{"prompt_tokens":9,"total_tokens":12,"completion_tokens":3,"prompt_tokens_details":null}}',
            Usage(9, None, 3),
            id="no details",
        ),
        pytest.param(
            b'{"usage":{"prompt_tokens":9,"total_tokens":12,"completion_tokens":3,'
            b'"prompt_tokens_details":{"audio_tokens":0,"cached_tokens":8}}}',
            Usage(9, 8, 3),
            id="further details",
        ),
        pytest.param(
            b'{"usage": {"completion_tokens": 3, "prompt_tokens": 9, "total_tokens": 12}}',
            Usage(9, None, 3),
            id="another order, with spaces",
        ),
        pytest.param(b'{"usage":{"prompt_tokens":9}}', Usage(9, None, 0), id="the prompt only"),
        pytest.param(
            b'data: {"usage":{"prompt_tokens":9,"completion_tokens":1}}\n\n'
            b'data: {"usage":{"prompt_tokens":9,"completion_tokens":2}}\n\n',
            Usage(9, None, 2),
            id="the last of several",
        ),
        pytest.param(b'{"usage":null}', None, id="null"),
        pytest.param(b'{"text":"\\"usage\\":{\\"prompt_tokens\\":9}"}', None, id="in a text"),
    ],
)
def test_the_last_usage_of_a_response_is_read(content: bytes, usage: Usage | None) -> None:
    assert parse_usage(content) == usage


def test_a_count_that_no_request_can_have_is_not_believed() -> None:
    huge = b"9" * 5_000
    for name in (b"prompt_tokens", b"total_tokens", b"completion_tokens"):
        usage = (
            b'"usage":{"prompt_tokens":1,"total_tokens":2,"completion_tokens":1,"prompt_tokens_details":null}'
        )
        found = parse_usage(usage.replace(b'"%b":' % name, b'"%b":%b' % (name, huge)))
        assert found is None or max(found.prompt_tokens, found.completion_tokens) < 100_000_000
