"""Certificates and kubeconfigs of a test cluster: ECDSA keys, valid for ten days, 0.1 s for all of them.

`cluster` issues them at its start. Never for a cluster that others use: the keys are plain files.
"""

import base64
import datetime
import ipaddress
import json
import time
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


class CertificateAndKey(NamedTuple):
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    def key_pem(self) -> bytes:
        return self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

    def certificate_pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def write(self, folder: Path, name: str) -> None:
        (folder / f"{name}.key").write_bytes(self.key_pem())
        (folder / f"{name}.crt").write_bytes(self.certificate_pem())


def read_certificate(folder: Path, name: str) -> CertificateAndKey:
    key = serialization.load_pem_private_key((folder / f"{name}.key").read_bytes(), password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return CertificateAndKey(key, x509.load_pem_x509_certificate((folder / f"{name}.crt").read_bytes()))


def create_authority(name: str) -> CertificateAndKey:
    return _sign_certificate(name, "", (), None)


def issue_certificate(
    issuer: CertificateAndKey, name: str, *, group: str = "", hosts: tuple[str, ...] = ()
) -> CertificateAndKey:
    """Issue a certificate for clients and servers: `name` is the user, `hosts` are the server's names."""
    return _sign_certificate(name, group, hosts, issuer)


def build_kubeconfig(issuer: CertificateAndKey, client: CertificateAndKey, server: str) -> str:
    def encode_pem(pem: bytes) -> str:
        return base64.b64encode(pem).decode()

    cluster = {"server": server, "certificate-authority-data": encode_pem(issuer.certificate_pem())}
    user = {
        "client-certificate-data": encode_pem(client.certificate_pem()),
        "client-key-data": encode_pem(client.key_pem()),
    }
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "test", "user": user}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "current-context": "test",
    }
    return json.dumps(config)


def write_service_account_keys(folder: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    pem = serialization.Encoding.PEM
    (folder / "sa.key").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption())
    )
    (folder / "sa.pub").write_bytes(
        key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    )


def _sign_certificate(
    name: str, group: str, hosts: tuple[str, ...], issuer: CertificateAndKey | None
) -> CertificateAndKey:
    key = ec.generate_private_key(ec.SECP256R1())
    attributes = [x509.NameAttribute(NameOID.COMMON_NAME, name)]
    if group:
        attributes.insert(0, x509.NameAttribute(NameOID.ORGANIZATION_NAME, group))
    subject = x509.Name(attributes)
    now = datetime.datetime.fromtimestamp(time.time(), datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.certificate.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=10))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
    )
    if issuer:
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
    if hosts:
        builder = builder.add_extension(
            x509.SubjectAlternativeName([_parse_host(h) for h in hosts]), critical=False
        )
    return CertificateAndKey(key, builder.sign(issuer.key if issuer else key, hashes.SHA256()))


def _parse_host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
