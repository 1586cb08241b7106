"""Which chats have media that each engine fetches by a URL."""

from typing import Any

import pytest

from fulcrum_router.http1.remote_media import has_remote_media

TEXT = {"type": "text", "text": "what is on https://x/y.png ?"}


@pytest.mark.parametrize(
    ("content", "remote"),
    [
        pytest.param("text with https://x/y.png", False, id="text"),
        pytest.param([TEXT], False, id="a text part"),
        pytest.param(
            [TEXT, {"type": "image_url", "image_url": {"url": "https://x/y.png"}}], True, id="image"
        ),
        pytest.param([{"image_url": {"url": "https://x/y.png"}}], True, id="without a type"),
        pytest.param([{"type": "video_url", "video_url": {"url": "http://x"}}], True, id="video"),
        pytest.param([{"type": "input_image", "image_url": "https://x/y.png"}], True, id="a URL as text"),
        pytest.param([{"type": "image_url", "image_url": {"url": "file:///x.png"}}], True, id="a file"),
        pytest.param(
            [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}], False, id="data"
        ),
        pytest.param([{"type": "input_audio", "input_audio": {"data": "AA"}}], False, id="audio in the body"),
        pytest.param(["a", None, 5], False, id="no parts"),
        pytest.param([{"image_url": {"url": 5}}], False, id="no text"),
    ],
)
def test_media_with_a_url_that_is_not_data_is_remote(content: Any, *, remote: bool) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": content}]
    assert has_remote_media({"messages": messages}) is remote


@pytest.mark.parametrize("fields", [{}, {"messages": None}, {"messages": ["x", None, {}]}], ids=str)
def test_a_request_without_messages_has_none(fields: dict[str, Any]) -> None:
    assert not has_remote_media(fields)
