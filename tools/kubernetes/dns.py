"""DNS server of a test cluster, instead of CoreDNS. `cluster.py` runs it as a program on the hub.

Arguments: the address to listen on (UDP port 53), and the folder with ca.crt, admin.crt and admin.key.
The server queries the API server at 127.0.0.1:6443 for each DNS query and caches nothing. Clients may
cache an answer for TTL_S seconds.

It answers A queries for Services (NAME.NAMESPACE.svc.cluster.local: the cluster address, or the ready pods
of a headless Service) and for pods with a hostname in a headless Service. For
a Service with `publishNotReadyAddresses`, pods that are not ready are included. The server has no SRV
records, no reverse names, and no names outside the cluster.
"""

import http.client
import json
import socket
import socketserver
import ssl
import struct
import sys
from pathlib import Path
from typing import Any

ZONE = ".svc.cluster.local"
A, TTL_S = 1, 5
NO_ERROR, NOT_FOUND = 0, 3


class NameResolver:
    def __init__(self, certificates: Path):
        self.context = ssl.create_default_context(cafile=certificates / "ca.crt")
        self.context.load_cert_chain(certificates / "admin.crt", certificates / "admin.key")

    def resolve(self, name: str) -> list[str] | None:
        """Return the addresses of a name; None without any, or if the API server returned an error.

        Raises OSError if the API server does not respond; the query then gets no answer.
        """
        if not name.endswith(ZONE):
            return None
        match name.removesuffix(ZONE).split("."):
            case [service, namespace]:
                hostname = None
            case [hostname, service, namespace]:
                pass
            case _:
                return None
        found = self._read_object(f"/api/v1/namespaces/{namespace}/services/{service}")
        if found is None:
            return None
        address = found["spec"].get("clusterIP", "None")
        if address != "None":
            return None if hostname else [address]
        include_unready = found["spec"].get("publishNotReadyAddresses", False)
        return self._resolve_endpoints(namespace, service, hostname, include_unready=include_unready)

    def _resolve_endpoints(
        self, namespace: str, service: str, hostname: str | None, *, include_unready: bool
    ) -> list[str] | None:
        selector = f"labelSelector=kubernetes.io%2Fservice-name%3D{service}"
        slices = self._read_object(
            f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices?{selector}"
        )
        endpoints = [
            endpoint
            for item in (slices or {"items": []})["items"]
            for endpoint in item.get("endpoints") or ()
        ]
        matching = [e for e in endpoints if hostname is None or e.get("hostname") == hostname]
        return [
            e["addresses"][0] for e in matching if include_unready or e["conditions"].get("ready")
        ] or None

    def _read_object(self, path: str) -> dict[str, Any] | None:
        connection = http.client.HTTPSConnection("127.0.0.1", 6443, context=self.context, timeout=3)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            if response.status != 200:
                return None
            response_body: dict[str, Any] = json.loads(response.read())
            return response_body
        finally:
            connection.close()


class DnsRequestHandler(socketserver.BaseRequestHandler):
    resolver: NameResolver

    def handle(self) -> None:
        packet, sender = self.request
        labels, at = [], 12
        while length := packet[at]:
            labels.append(packet[at + 1 : at + 1 + length].decode("ascii", "replace"))
            at += 1 + length
        kind, _ = struct.unpack_from("!HH", packet, at + 1)
        found = self.resolver.resolve(".".join(labels).lower())
        answers = found if found and kind == A else []
        # Flags: response, authoritative, recursion available. Recursion desired is copied from the query.
        flags = (
            0x8480
            | struct.unpack_from("!H", packet, 2)[0] & 0x0100
            | (NOT_FOUND if found is None else NO_ERROR)
        )
        reply = packet[:2] + struct.pack("!HHHHH", flags, 1, len(answers), 0, 0) + packet[12 : at + 5]
        for address in answers:
            reply += struct.pack("!HHHIH", 0xC00C, A, 1, TTL_S, 4) + socket.inet_aton(address)
        sender.sendto(reply, self.client_address)


if __name__ == "__main__":
    DnsRequestHandler.resolver = NameResolver(Path(sys.argv[2]))
    with socketserver.ThreadingUDPServer((sys.argv[1], 53), DnsRequestHandler) as server:
        server.serve_forever()
