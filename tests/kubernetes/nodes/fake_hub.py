"""A model hub inside a test cluster: two files of one model, and a count of what was downloaded."""

import contextlib
import hashlib
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tools.kubernetes.cluster import Cluster
from tools.kubernetes.control_plane import API_ADDRESS

PORT = 5001
ENDPOINT = f"http://{API_ADDRESS}:{PORT}"
_COMMIT = "a" * 40


@contextlib.contextmanager
def serve_hub(cluster: Cluster, model: str, files: Mapping[str, bytes]) -> Iterator[Counter[str]]:
    """Serve the files of the model while the block runs; yields the downloads by file name."""
    downloads = Counter[str]()
    with cluster.hub.enter_network():
        server = ThreadingHTTPServer((API_ADDRESS, PORT), _make_handler(model, files, downloads))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield downloads
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _make_handler(
    model: str, files: Mapping[str, bytes], downloads: Counter[str]
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._respond(with_body=False)

        def do_GET(self) -> None:
            self._respond(with_body=True)

        def _respond(self, *, with_body: bool) -> None:
            path, _, name = self.path.partition("?")[0].rpartition("/")
            if path != f"/{model}/resolve/main" or name not in files:
                self.send_error(404)
                return
            body = files[name]
            self.send_response(200)
            self.send_header("X-Repo-Commit", _COMMIT)
            self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body:
                downloads[name] += 1
                self.wfile.write(body)

        def log_message(self, format: str, *values: object) -> None:  # noqa: A002 - the name is inherited
            """Log nothing."""

    return Handler
