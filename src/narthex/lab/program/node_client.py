"""Requests to node processes of a lab: health, sync times, announcer status."""

from __future__ import annotations

import re
import socket

import msgspec

from narthex.lb.why import AnnouncerStatus, read_status
from narthex.linux.namespaces import in_namespace

HEALTH_PORT = 10256
METRICS_PORT = 10249
"""Ports of the proxy, which are those of `narthex node` unless the node also runs a kube-proxy."""
BESIDE_HEALTH_PORT = 10266
BESIDE_METRICS_PORT = 10269
"""Ports of `narthex node` on a node that also runs a kube-proxy."""
_TIMES = re.compile(
    rb'^kubeproxy_sync_proxy_rules_last(_queued)?_timestamp_seconds\{[^}]*ip_family="([^"]+)"[^}]*\} (\S+)',
    re.MULTILINE,
)


def get(namespace: str, port: int, path: str, timeout: float = 2.0) -> tuple[int, bytes]:
    """Return HTTP status and body from a loopback port of a namespace. Raises OSError if nothing answers."""
    with in_namespace(namespace):
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    with sock:
        sock.settimeout(timeout)
        sock.connect(("127.0.0.1", port))
        sock.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        answer = b""
        while part := sock.recv(65536):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    words = head.split(None, 2)
    if len(words) < 2 or not words[1].isdigit():
        raise OSError(f"port {port} does not speak HTTP")
    return int(words[1]), body


def healthy(namespace: str, *, kube_proxy: bool = False) -> bool:
    """Return True if the proxy has synced and all parts of the node's process work. With `kube_proxy`, that is another program."""
    try:
        status, body = get(namespace, BESIDE_HEALTH_PORT if kube_proxy else HEALTH_PORT, "/healthz")
        parts = msgspec.json.decode(body)["parts"]
        proxy = get(namespace, HEALTH_PORT, "/healthz")[0] if kube_proxy else 200
    except (OSError, msgspec.DecodeError, KeyError):
        return False
    return status == proxy == 200 and all(part["healthy"] for part in parts.values())


def synced_since(namespace: str, moment: float) -> bool:
    """Return True if the proxy has seen a change after `moment` (seconds since 1970) and has written all changes it has seen."""
    try:
        _, body = get(namespace, METRICS_PORT, "/metrics")
    except OSError:
        return False
    written: dict[bytes, float] = {}
    seen: dict[bytes, float] = {}
    for queued, family, value in _TIMES.findall(body):
        (seen if queued else written)[family] = float(value)
    return bool(seen) and all(moment <= time and time <= written.get(family, 0.0) for family, time in seen.items())


def announcer_status(namespace: str) -> AnnouncerStatus | None:
    """Return the status of the node's announcer, None if none runs or it is starting."""
    for port in (METRICS_PORT, BESIDE_METRICS_PORT):
        try:
            status, body = get(namespace, port, "/announcer")
        except OSError:
            continue
        if status == 200:
            return read_status(body)
    return None
