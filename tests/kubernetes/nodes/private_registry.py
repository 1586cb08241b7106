"""A registry that asks for a password, inside a test cluster; nodes pull the image of one archive from it."""

import base64
import contextlib
import hashlib
import json
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tools.kubernetes.cluster import Cluster
from tools.kubernetes.control_plane import API_ADDRESS

PORT = 5000
REGISTRY = f"{API_ADDRESS}:{PORT}"
USER, PASSWORD = "puller", "a-password"
_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
_CONFIG = "application/vnd.docker.container.image.v1+json"
_LAYER = "application/vnd.docker.image.rootfs.diff.tar"


def build_pull_secret(name: str) -> dict[str, Any]:
    """Return a pull Secret with the registry's password."""
    auth = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    config = json.dumps({"auths": {REGISTRY: {"username": USER, "password": PASSWORD, "auth": auth}}})
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/dockerconfigjson",
        "metadata": {"name": name},
        "stringData": {".dockerconfigjson": config},
    }


@contextlib.contextmanager
def serve_private_registry(cluster: Cluster, archive: Path, repository: str) -> Iterator[str]:
    """Serve the archive's image on the hub while the block runs; yields the image's name."""
    content = _read_archive(archive)
    with cluster.hub.enter_network():
        server = ThreadingHTTPServer((API_ADDRESS, PORT), _make_handler(content, repository))
    for name in cluster.nodes:
        folder = cluster.folder / name / "registries" / REGISTRY
        folder.mkdir(parents=True, exist_ok=True)
        host = f'[host."http://{REGISTRY}"]\n  capabilities = ["pull", "resolve"]\n'
        (folder / "hosts.toml").write_text(f'server = "http://{REGISTRY}"\n{host}', encoding="utf-8")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"{REGISTRY}/{repository}:1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _read_archive(archive: Path) -> dict[str, tuple[str, bytes]]:
    """Return the image's manifest and blobs with their types, by tag or digest."""
    with tarfile.open(archive) as tar:

        def read(name: str) -> bytes:
            member = tar.extractfile(name)
            assert member is not None
            return member.read()

        (entry,) = json.loads(read("manifest.json"))
        # Its own id: the kubelet asks for the password wherever an image of this id is used afterwards.
        config = json.dumps(json.loads(read(entry["Config"])) | {"author": "the private registry"}).encode()
        blobs = [(_CONFIG, config), *((_LAYER, read(layer)) for layer in entry["Layers"])]
    first, *layers = ({"mediaType": kind, **_describe(body)} for kind, body in blobs)
    manifest = {"schemaVersion": 2, "mediaType": _MANIFEST, "config": first, "layers": layers}
    body = json.dumps(manifest).encode()
    named = {"1": (_MANIFEST, body), _describe(body)["digest"]: (_MANIFEST, body)}
    return named | {_describe(blob)["digest"]: ("application/octet-stream", blob) for _, blob in blobs}


def _describe(body: bytes) -> dict[str, Any]:
    return {"size": len(body), "digest": f"sha256:{hashlib.sha256(body).hexdigest()}"}


def _make_handler(content: dict[str, tuple[str, bytes]], repository: str) -> type[BaseHTTPRequestHandler]:
    expected = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._respond(with_body=True)

        def do_HEAD(self) -> None:
            self._respond(with_body=False)

        def _respond(self, *, with_body: bool) -> None:
            path, _, reference = self.path.partition("?")[0].rpartition("/")
            known = path in (f"/v2/{repository}/manifests", f"/v2/{repository}/blobs")
            if self.headers.get("Authorization") != expected:
                self._send(401, "application/json", b"{}", with_body=with_body)
            elif known and reference in content:
                self._send(200, *content[reference], with_body=with_body)
            else:
                self._send(404, "application/json", b"{}", with_body=with_body)

        def _send(self, status: int, kind: str, body: bytes, *, with_body: bool) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Docker-Content-Digest", _describe(body)["digest"])
            if status == 401:
                self.send_header("WWW-Authenticate", 'Basic realm="private"')
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, format: str, *values: object) -> None:  # noqa: A002 - the name is inherited
            """Log nothing."""

    return Handler
