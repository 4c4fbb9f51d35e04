"""Questions to the processes of a lab: a proxy's health, a proxy's times, a request to the lab process."""

from __future__ import annotations

import re
import socket

import msgspec

from narthex.linux import namespaces as netns

HEALTH_PORT = 10256
METRICS_PORT = 10249
_TIMES = re.compile(
    rb'^kubeproxy_sync_proxy_rules_last(_queued)?_timestamp_seconds\{[^}]*ip_family="([^"]+)"[^}]*\} (\S+)',
    re.MULTILINE,
)


def get(namespace: str, port: int, path: str, timeout: float = 2.0) -> tuple[int, bytes]:
    """HTTP status and body from the loopback address of a namespace. Raises OSError when nobody answers there."""
    with netns.entered(namespace):
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


def healthy(namespace: str) -> bool:
    """Whether the node's process says that the kernel holds what its proxy wants, and that all its parts do their work."""
    try:
        status, body = get(namespace, HEALTH_PORT, "/healthz")
        parts = msgspec.json.decode(body)["parts"]
    except (OSError, msgspec.DecodeError, KeyError):
        return False
    return status == 200 and all(part["healthy"] for part in parts.values())


def synced_since(namespace: str, moment: float) -> bool:
    """Whether the node's proxy has seen a change after this moment (seconds since 1970) and written all it has seen."""
    try:
        _, body = get(namespace, METRICS_PORT, "/metrics")
    except OSError:
        return False
    written: dict[bytes, float] = {}
    seen: dict[bytes, float] = {}
    for queued, family, value in _TIMES.findall(body):
        (seen if queued else written)[family] = float(value)
    return bool(seen) and all(moment <= time and time <= written.get(family, 0.0) for family, time in seen.items())


class AnnouncedAddress(msgspec.Struct, frozen=True):
    """What a node's announcer says of one address."""

    address: str
    turn: str
    """The node whose turn it is; empty when none can answer."""
    answers: bool


class AnnouncerState(msgspec.Struct, frozen=True):
    """What a node's announcer says, as much of it as matters here."""

    listening: bool
    """It decides nothing yet."""
    entries: tuple[AnnouncedAddress, ...] = msgspec.field(name="addresses")

    @property
    def addresses(self) -> dict[str, AnnouncedAddress]:
        """By address."""
        return {each.address: each for each in self.entries}


def announcer_status(namespace: str) -> bytes:
    """The status of the node's announcer, JSON (`docs/reference/announcer.md`); empty when none runs."""
    try:
        status, body = get(namespace, METRICS_PORT, "/announcer")
    except OSError:
        return b""
    return body if status == 200 else b""


def announcer_state(namespace: str) -> AnnouncerState | None:
    """What the node's announcer says; None when none runs, or it has just begun."""
    try:
        return msgspec.json.decode(announcer_status(namespace), type=AnnouncerState)
    except msgspec.DecodeError:
        return None
