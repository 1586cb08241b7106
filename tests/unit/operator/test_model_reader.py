"""The model reader program, with a folder and with a hub server on the loopback network."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fulcrum_core.models import excerpt_config
from fulcrum_operator.model_reader import (
    REPORT_BYTES_MAX,
    ConfigUnreadable,
    excerpt_report,
    main,
    read_folder,
    read_hub,
)

CONFIG = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "_name_or_path": "x"}
BODY = json.dumps(CONFIG).encode()
CONFIG_PATH = "/acme/model/resolve/main/config.json"


@dataclass
class Hub:
    """Responses by path, as (status, body); the body of a redirect is its target."""

    url: str = ""
    responses: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    failures: int = 0
    """Number of requests that get 503 first."""
    error_code: str = ""
    """Header X-Error-Code of each response, as Hugging Face sends it."""
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    """Path and Authorization header of each request."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    running_hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            running_hub.requests.append((self.path, self.headers.get("authorization")))
            status, body = running_hub.responses.get(self.path, (404, b""))
            if running_hub.failures:
                running_hub.failures, status, body = running_hub.failures - 1, 503, b""
            self.send_response(status)
            if status in (302, 307):
                self.send_header("location", body.decode())
            if running_hub.error_code:
                self.send_header("x-error-code", running_hub.error_code)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    running_hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield running_hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def fetch_config(hub: Hub, model: str = "acme/model", revision: str = "main", token: str = "") -> bytes:
    """The config that the reader gets, without pauses between retries."""
    return read_hub(model, revision, hub=hub.url, token=token, pause=lambda _: None)


def test_hub_request_has_the_revision_and_the_token(hub: Hub) -> None:
    hub.responses["/acme/model/resolve/refs%2Fpr%2F1/config.json"] = 200, BODY
    assert fetch_config(hub, revision="refs/pr/1", token="secret") == BODY
    assert hub.requests == [("/acme/model/resolve/refs%2Fpr%2F1/config.json", "Bearer secret")]


def test_a_redirect_is_followed(hub: Hub) -> None:
    hub.responses |= {CONFIG_PATH: (307, b"/api/elsewhere"), "/api/elsewhere": (200, BODY)}
    assert fetch_config(hub) == BODY


def test_the_token_is_not_sent_to_another_host(hub: Hub) -> None:
    elsewhere = hub.url.replace("127.0.0.1", "localhost")
    hub.responses |= {CONFIG_PATH: (302, f"{elsewhere}/store".encode()), "/store": (200, BODY)}
    assert fetch_config(hub, token="secret") == BODY
    assert hub.requests == [(CONFIG_PATH, "Bearer secret"), ("/store", None)]


def test_request_to_an_unavailable_hub_is_retried(hub: Hub) -> None:
    hub.responses[CONFIG_PATH] = 200, BODY
    hub.failures = 2
    assert fetch_config(hub) == BODY


TOKEN_REQUIRED = "no such model, or a token is required: name its Secret in spec.modelSource.tokenSecret"
TOKEN_REFUSED = "the hub does not accept the token in spec.modelSource.tokenSecret or the variable HF_TOKEN"


@pytest.mark.parametrize(
    ("status", "code", "token", "why"),
    [
        pytest.param(401, "", "", TOKEN_REQUIRED, id="no token"),
        pytest.param(401, "GatedRepo", "", TOKEN_REQUIRED, id="no token for a model with terms"),
        pytest.param(401, "", "x", TOKEN_REFUSED, id="an invalid token"),
        pytest.param(403, "", "", TOKEN_REQUIRED, id="a proxy without a token"),
        pytest.param(
            403, "GatedRepo", "x", "the token has no access to the model", id="a token without access"
        ),
        pytest.param(
            404, "RepoNotFound", "x", "no such model, or the token has no access to it", id="no model"
        ),
        pytest.param(404, "RevisionNotFound", "", "the model has no such revision", id="no revision"),
        pytest.param(404, "EntryNotFound", "", "the model has no such file", id="no file"),
        pytest.param(404, "", "", "no such model, revision or file", id="not found by another hub"),
        pytest.param(500, "", "", "the hub responded with an error", id="a broken hub"),
    ],
)
def test_hub_error_names_the_reason(hub: Hub, status: int, code: str, token: str, why: str) -> None:
    hub.responses[CONFIG_PATH] = status, b""
    hub.error_code = code
    with pytest.raises(ConfigUnreadable) as refused:
        fetch_config(hub, token=token)
    assert str(refused.value) == f"{hub.url}{CONFIG_PATH}: {why} (status {status})"
    assert len(hub.requests) == (3 if status == 500 else 1), "permanent errors are not retried"


def test_unreachable_hub_is_named_in_the_error() -> None:
    unreachable = Hub(url="http://127.0.0.1:1")
    with pytest.raises(ConfigUnreadable, match=r"http://127.0.0.1:1/acme/model/.*refused"):
        fetch_config(unreachable)


def test_name_that_no_hub_can_have_is_not_requested(hub: Hub) -> None:
    with pytest.raises(ConfigUnreadable, match=r"^no hub model has such a name: for a model elsewhere"):
        fetch_config(hub, model="/opt/model")
    assert hub.requests == []


def test_oversized_config_is_not_read_to_its_end(hub: Hub) -> None:
    hub.responses[CONFIG_PATH] = 200, b" " * (2**22 + 1)
    with pytest.raises(ConfigUnreadable, match="is larger than 4 MiB"):
        fetch_config(hub)


@pytest.mark.parametrize(
    ("path", "listing"),
    [("", " contains llama"), ("lama", " contains llama"), ("llama", "/llama is empty"), ("a/b", None)],
    ids=["a folder too high", "a misspelled folder", "an empty folder", "no folder near it"],
)
def test_error_for_a_missing_config_lists_what_the_folder_contains(
    tmp_path: Path, path: str, listing: str | None
) -> None:
    (tmp_path / "llama").mkdir()
    with pytest.raises(ConfigUnreadable) as refused:
        read_folder(tmp_path / path)
    missing = f"{tmp_path / path}/config.json: No such file or directory"
    assert str(refused.value) == (missing if listing is None else f"{missing}; {tmp_path}{listing}")


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"{", "config.json is not JSON"),
        (b"[]", "config.json is not a JSON object"),
        (b'{"head_dim": NaN}', "config.json contains NaN or Infinity"),
        (
            json.dumps({"layer_types": ["x"] * 2000}).encode(),
            "the excerpt of config.json has 8017 bytes, the limit is 4096",
        ),
    ],
)
def test_invalid_config_is_refused_with_a_reason(body: bytes, why: str) -> None:
    with pytest.raises(ConfigUnreadable) as refused:
        excerpt_report(body)
    assert str(refused.value) == why


def test_success_report_is_the_config_excerpt(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(BODY)
    report = tmp_path / "report"
    with pytest.raises(SystemExit) as ended:
        main(["--folder", str(tmp_path), "--report", str(report)])
    assert (ended.value.code, json.loads(report.read_text())) == (0, excerpt_config(CONFIG))


def test_failure_report_is_one_line_within_the_size_limit(tmp_path: Path) -> None:
    report, folder = tmp_path / "report", tmp_path / ("long\n" * 40) / ("x" * 200)
    with pytest.raises(SystemExit) as ended:
        main(["--folder", str(folder), "--report", str(report)])
    text = report.read_text()
    assert (ended.value.code, text.count("\n")) == (1, 0)
    assert len(text.encode()) <= REPORT_BYTES_MAX


def test_report_that_cannot_be_written_is_an_error_in_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kubernetes takes the end of the log where the file is empty; the operator takes its last line."""
    (tmp_path / "config.json").write_bytes(BODY)
    with pytest.raises(SystemExit) as ended:
        main(["--folder", str(tmp_path), "--report", "/dev/full"])
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert (ended.value.code, last_line) == (
        1,
        "/dev/full: No space left on device: the result cannot be written",
    )


def test_hub_url_and_token_come_from_the_environment(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.responses[CONFIG_PATH] = 200, BODY
    monkeypatch.setenv("HF_ENDPOINT", f"{hub.url}/")
    monkeypatch.setenv("HF_TOKEN", "secret")
    with pytest.raises(SystemExit) as ended:
        main(["--model", "acme/model", "--report", str(tmp_path / "report")])
    assert (ended.value.code, hub.requests) == (0, [(CONFIG_PATH, "Bearer secret")])
