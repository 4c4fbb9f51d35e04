"""How a lab's API is reached: a certificate, a token, and kubeconfigs for people and for nodes."""

from __future__ import annotations

import base64
import os
import ssl
from pathlib import Path

from narthex.host.run import run
from narthex.lab.cluster import API_SERVICE_ADDRESS
from narthex.lab.topology import API_ADDRESS

_NAMES = (
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
    "localhost",
)
_DAYS = "3650"


def make_certificate(certificate: Path, key: Path) -> None:
    """A key, and a certificate that it has signed itself: its own authority. Raises CommandError, OSError."""
    addresses = ("127.0.0.1", "::1", API_ADDRESS, API_SERVICE_ADDRESS)
    names = ",".join([*(f"DNS:{name}" for name in _NAMES), *(f"IP:{address}" for address in addresses)])
    run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", str(key), "-out", str(certificate), "-days", _DAYS, "-subj", "/CN=narthex-lab"),
            *("-addext", f"subjectAltName={names}", "-addext", "keyUsage=critical,digitalSignature,keyCertSign"),
            *("-addext", "extendedKeyUsage=serverAuth"),
        ],
        timeout=60,
    )
    key.chmod(0o600)


def write_secret(path: Path, text: str) -> None:
    """Write a file that only its owner reads."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(text)


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """TLS as the server speaks it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certificate, key)
    return context


def kubeconfig(lab: str, server: str, certificate: Path, token: str) -> str:
    """A kubeconfig, whole in itself. All that is put in is of our own making."""
    authority = base64.b64encode(certificate.read_bytes()).decode()
    name = f"narthex-{lab}"
    return (
        "apiVersion: v1\nkind: Config\n"
        f"current-context: {name}\n"
        f"clusters:\n- name: {name}\n  cluster:\n    server: {server}\n    certificate-authority-data: {authority}\n"
        f"users:\n- name: {name}\n  user:\n    token: {token}\n"
        f"contexts:\n- name: {name}\n  context:\n    cluster: {name}\n    user: {name}\n"
    )
