"""How a lab's API is reached: names of its certificate, secrets, and kubeconfigs for people and for nodes."""

from __future__ import annotations

import base64
import os
from pathlib import Path

from narthex.lab.cluster import API_SERVICE_ADDRESS
from narthex.lab.topology import API_ADDRESS

NAMES = (
    "127.0.0.1",
    "::1",
    "localhost",
    API_ADDRESS,
    API_SERVICE_ADDRESS,
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
)
"""What the API server's certificate is for."""


def write_secret(path: Path, text: str) -> None:
    """Write a file that only its owner reads."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(text)


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
