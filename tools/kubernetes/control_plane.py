"""Flags of each control plane component, and why they differ from those of a normal cluster.

`cluster` starts the components with them.
"""

from collections.abc import Mapping
from pathlib import Path

API_ADDRESS = "10.88.0.1"
SERVICE_CIDR, POD_CIDR = "10.96.0.0/16", "10.89.0.0/16"
SERVICE_ACCOUNT_ISSUER = "https://kubernetes.default.svc.cluster.local"
Flags = dict[str, str]

# dns.py on the hub serves it: a Service without a selector.
DNS_SERVICE = f"""
apiVersion: v1
kind: Service
metadata: {{name: kube-dns, namespace: kube-system}}
spec: {{clusterIP: 10.96.0.10, ports: [{{name: dns, protocol: UDP, port: 53}}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: kube-dns, namespace: kube-system, labels: {{kubernetes.io/service-name: kube-dns}}}}
addressType: IPv4
ports: [{{name: dns, protocol: UDP, port: 53}}]
endpoints: [{{addresses: ["{API_ADDRESS}"], conditions: {{ready: true}}}}]
"""


def build_etcd_flags() -> Flags:
    return {
        "data-dir": "/var/lib/etcd", "unsafe-no-fsync": "true", "log-level": "warn",
        "listen-client-urls": "http://127.0.0.1:2379", "advertise-client-urls": "http://127.0.0.1:2379",
        "listen-peer-urls": "http://127.0.0.1:2380",
    }  # fmt: skip


def build_api_server_flags(certificates: Path, overrides: Mapping[str, str]) -> Flags:
    """Return the API server's flags; `overrides` replace the ones here."""
    certs = certificates
    return {
        "etcd-servers": "http://127.0.0.1:2379", "advertise-address": API_ADDRESS, "secure-port": "6443",
        "service-cluster-ip-range": SERVICE_CIDR, "allow-privileged": "true", "shutdown-delay-duration": "0s",
        "client-ca-file": f"{certs}/ca.crt",
        "tls-cert-file": f"{certs}/apiserver.crt", "tls-private-key-file": f"{certs}/apiserver.key",
        "authorization-mode": "Node,RBAC", "enable-admission-plugins": "NodeRestriction",
        "service-account-issuer": SERVICE_ACCOUNT_ISSUER,
        "service-account-key-file": f"{certs}/sa.pub", "service-account-signing-key-file": f"{certs}/sa.key",
        "kubelet-client-certificate": f"{certs}/admin.crt", "kubelet-client-key": f"{certs}/admin.key",
        "kubelet-certificate-authority": f"{certs}/ca.crt", "kubelet-preferred-address-types": "InternalIP",
        "requestheader-client-ca-file": f"{certs}/front-proxy-ca.crt",
        "requestheader-allowed-names": "front-proxy-client",
        "requestheader-username-headers": "X-Remote-User", "requestheader-group-headers": "X-Remote-Group",
        "requestheader-extra-headers-prefix": "X-Remote-Extra-",
        "proxy-client-cert-file": f"{certs}/front-proxy-client.crt",
        "proxy-client-key-file": f"{certs}/front-proxy-client.key",
        # Webhooks and aggregated APIs are called at pod addresses: the hub has no kube-proxy.
        "enable-aggregator-routing": "true",
        # Pods leave a lost node after 30 s instead of 300. With less, a restart of the API server would evict
        # pods: all nodes look lost then, and for 10 s more, because kubelets retry only every 7 s.
        "default-not-ready-toleration-seconds": "30", "default-unreachable-toleration-seconds": "30",
    } | dict(overrides)  # fmt: skip


def build_scheduler_flags(folder: Path) -> Flags:
    return _build_client_flags(folder, "kube-scheduler")


def build_controller_manager_flags(folder: Path) -> Flags:
    certs = folder / "pki"
    return _build_client_flags(folder, "kube-controller-manager") | {
        "service-account-private-key-file": f"{certs}/sa.key", "root-ca-file": f"{certs}/ca.crt",
        "use-service-account-credentials": "true",
        "kube-api-qps": "500", "kube-api-burst": "1000",  # the defaults, 20 and 30, make the start 4 s slower
        "cluster-signing-cert-file": f"{certs}/ca.crt", "cluster-signing-key-file": f"{certs}/ca.key",
        "flex-volume-plugin-dir": "/var/lib/flexvolumes",  # the default is a folder below /usr
        "node-monitor-period": "2s", "node-monitor-grace-period": "10s",
    }  # fmt: skip


def _build_client_flags(folder: Path, name: str) -> Flags:
    kubeconfig = str(folder / "pki" / f"{name}.kubeconfig")
    return {"leader-elect": "false", "bind-address": "127.0.0.1"} | dict.fromkeys(
        ("kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig"), kubeconfig
    )
