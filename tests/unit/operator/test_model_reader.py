"""The program that reads a model's config.json: from a folder, or from a hub on the loopback network."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fulcrum_core.models import excerpt
from fulcrum_operator.model_reader import (
    LAST_WORDS_BYTES,
    Unreadable,
    last_words,
    main,
    read_folder,
    read_hub,
)

CONFIG = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "_name_or_path": "x"}
BODY = json.dumps(CONFIG).encode()
PLACE = "/acme/model/resolve/main/config.json"


@dataclass
class Hub:
    """What it holds by path, as (status, body); a body of text with a redirect is where to."""

    url: str = ""
    holds: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    failures: int = 0
    """So many requests are answered 503 first."""
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    """Path and Authorization."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            made.asked.append((self.path, self.headers.get("authorization")))
            status, body = made.holds.get(self.path, (404, b""))
            if made.failures:
                made.failures, status, body = made.failures - 1, 503, b""
            self.send_response(status)
            if status in (302, 307):
                self.send_header("location", body.decode())
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    made.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield made
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def ask(hub: Hub, model: str = "acme/model", revision: str = "main", token: str = "") -> bytes:
    """What the reader gets, without waiting between tries."""
    return read_hub(model, revision, hub=hub.url, token=token, pause=lambda _: None)


def test_a_hub_is_asked_for_the_revision_with_the_token(hub: Hub) -> None:
    hub.holds["/acme/model/resolve/refs%2Fpr%2F1/config.json"] = 200, BODY
    assert ask(hub, revision="refs/pr/1", token="secret") == BODY
    assert hub.asked == [("/acme/model/resolve/refs%2Fpr%2F1/config.json", "Bearer secret")]


def test_a_redirect_is_followed(hub: Hub) -> None:
    hub.holds |= {PLACE: (307, b"/api/elsewhere"), "/api/elsewhere": (200, BODY)}
    assert ask(hub) == BODY


def test_a_token_goes_to_no_other_host(hub: Hub) -> None:
    elsewhere = hub.url.replace("127.0.0.1", "localhost")
    hub.holds |= {PLACE: (302, f"{elsewhere}/store".encode()), "/store": (200, BODY)}
    assert ask(hub, token="secret") == BODY
    assert hub.asked == [(PLACE, "Bearer secret"), ("/store", None)]


def test_a_hub_that_cannot_now_is_asked_again(hub: Hub) -> None:
    hub.holds[PLACE] = 200, BODY
    hub.failures = 2
    assert ask(hub) == BODY


@pytest.mark.parametrize(
    ("status", "why"),
    [
        (401, "it asks for a token: modelSource.tokenSecret names the Secret (status 401)"),
        (403, "the token may not read it (status 403)"),
        (404, "it has no such model or revision, or hides it from this token (status 404)"),
        (500, "answers with status 500"),
    ],
)
def test_a_refusal_says_what_to_do(hub: Hub, status: int, why: str) -> None:
    hub.holds[PLACE] = status, b""
    with pytest.raises(Unreadable) as refused:
        ask(hub)
    assert str(refused.value) == f"{hub.url}{PLACE}: {why}"
    assert len(hub.asked) == (3 if status == 500 else 1), "what will not change is asked once"


def test_a_hub_that_is_away_is_named() -> None:
    nobody = Hub(url="http://127.0.0.1:1")
    with pytest.raises(Unreadable, match=r"http://127.0.0.1:1/acme/model/.*refused"):
        ask(nobody)


def test_what_is_no_name_at_a_hub_is_not_asked_for(hub: Hub) -> None:
    with pytest.raises(Unreadable, match=r"spec.model \(/opt/model\) is no name at a hub"):
        ask(hub, model="/opt/model")
    assert hub.asked == []


def test_a_file_that_cannot_be_one_is_not_read_to_its_end(hub: Hub) -> None:
    hub.holds[PLACE] = 200, b" " * (2**22 + 1)
    with pytest.raises(Unreadable, match="is longer than"):
        ask(hub)


@pytest.mark.parametrize(
    ("path", "beside"),
    [("", " holds llama"), ("lama", " holds llama"), ("llama", "/llama is empty"), ("a/b", None)],
    ids=["a folder too high", "a misspelled folder", "an empty folder", "no folder near it"],
)
def test_a_folder_without_one_is_told_with_what_is_there(
    tmp_path: Path, path: str, beside: str | None
) -> None:
    (tmp_path / "llama").mkdir()
    with pytest.raises(Unreadable) as refused:
        read_folder(tmp_path / path)
    missing = f"{tmp_path / path}/config.json: No such file or directory"
    assert str(refused.value) == (missing if beside is None else f"{missing}; {tmp_path}{beside}")


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"{", "config.json is not JSON"),
        (b"[]", "config.json holds no object"),
        (b'{"head_dim": NaN}', "config.json holds a number that is none"),
        (
            json.dumps({"layer_types": ["x"] * 2000}).encode(),
            "config.json: its excerpt takes 8017 bytes of 4096",
        ),
    ],
)
def test_what_is_no_description_of_a_model_has_a_reason(body: bytes, why: str) -> None:
    with pytest.raises(Unreadable) as refused:
        last_words(body)
    assert str(refused.value) == why


def test_its_last_words_are_the_excerpt(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(BODY)
    report = tmp_path / "said"
    with pytest.raises(SystemExit) as ended:
        main(["--folder", str(tmp_path), "--report", str(report)])
    assert (ended.value.code, json.loads(report.read_text())) == (0, excerpt(CONFIG))


def test_its_last_words_are_one_line_that_says_why(tmp_path: Path) -> None:
    report, folder = tmp_path / "said", tmp_path / ("long\n" * 40) / ("x" * 200)
    with pytest.raises(SystemExit) as ended:
        main(["--folder", str(folder), "--report", str(report)])
    said = report.read_text()
    assert (ended.value.code, said.count("\n")) == (1, 0)
    assert len(said.encode()) <= LAST_WORDS_BYTES


def test_a_hub_of_the_users_own_is_asked(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.holds[PLACE] = 200, BODY
    monkeypatch.setenv("HF_ENDPOINT", f"{hub.url}/")
    monkeypatch.setenv("HF_TOKEN", "secret")
    with pytest.raises(SystemExit) as ended:
        main(["--model", "acme/model", "--report", str(tmp_path / "said")])
    assert (ended.value.code, hub.asked) == (0, [(PLACE, "Bearer secret")])
