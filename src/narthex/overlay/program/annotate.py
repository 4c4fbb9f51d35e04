"""What this node publishes about itself, and the writer of its annotations and its condition NetworkUnavailable."""

from __future__ import annotations

import asyncio
import datetime
import os
import threading
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from narthex.kube.access import Access
from narthex.kube.client import ApiError, writing
from narthex.linux.background import in_background
from narthex.linux.clock import Clock, SystemClock
from narthex.model import IPFamily, Node, family_of
from narthex.model.backoff import Backoff
from narthex.overlay.annotations import AnnotationKeys, changed_annotations, derived_mac, given_public_ip, vtep_mac
from narthex.overlay.changes import OverlayState
from narthex.overlay.desired import ExternalInterface, device_name
from narthex.overlay.net_conf import NetConf
from narthex.runtime.logs import LOGGER

_BACKOFF = Backoff(1.0, 30.0)
_SECONDS = 15.0
_STOP_SECONDS = 5.0
"""Time for a running write during shutdown; after that the thread ends with the process."""


class NodeWriter:
    """Patches a Node through an API server, with one connection per write: writes are rare."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def patch(self, node: str, body: dict[str, Any]) -> None:
        """Apply a strategic merge patch to the Node and its status. Raises RuntimeError."""
        try:
            asyncio.run(self._patch(f"/api/v1/nodes/{node}", body))
        except ApiError as error:
            raise RuntimeError(str(error)) from error

    async def _patch(self, path: str, body: dict[str, Any]) -> None:
        async with writing(self._access, _SECONDS) as writer:
            # The status subresource accepts annotations, too: flannel needs only this permission, and so do we.
            await writer.patch(path, body, kind="strategic", subresource="status")


class NodeAnnotator:
    """Writes from its own thread, so that an unresponsive API server does not delay route repairs."""

    def __init__(self, writes: NodeWriter, condition: bool, clock: Clock | None = None) -> None:
        """Set the writer; `condition`: also set NetworkUnavailable to False."""
        self._writes = writes
        self._condition = condition
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._desired: Mapping[str, str] = {}
        self._node: Node | None = None
        self._condition_uid: str | None = None
        """UID of the Node whose condition was written."""
        self._stopping = False

    def set_desired(self, node: Node, annotations: Mapping[str, str]) -> None:
        """Set the desired annotations and the current Node."""
        with self._lock:
            self._node, self._desired = node, annotations
        if self._body() is not None:
            self._clock.wake()

    def running(self) -> AbstractContextManager[None]:
        """Return a context manager that runs the writer thread."""
        return in_background("overlay-announcer", self._run, self._stop, patience=_STOP_SECONDS)

    def _stop(self) -> None:
        self._stopping = True
        self._clock.wake()

    def _run(self) -> None:
        failures, not_before = 0, 0.0
        while not self._stopping:
            ahead = not_before - self._clock.now()
            body, node = self._body(), self._node
            if ahead > 0 or body is None or node is None:
                self._clock.sleep(ahead if ahead > 0 else _BACKOFF.longest)
                continue
            try:
                self._writes.patch(node.name, body)
            except RuntimeError as error:
                failures += 1
                rest = _BACKOFF.delay(failures)
                LOGGER.error("overlay: cannot update node %s: %s; retrying in %g s", node.name, error, rest)
            else:
                LOGGER.info("overlay: updated the annotations of node %s", node.name)
                self._condition_uid = node.uid
                # Wait for the watch to deliver the write.
                failures = 0
            not_before = self._clock.now() + _BACKOFF.delay(max(failures, 1))

    def _body(self) -> dict[str, Any] | None:
        with self._lock:
            node, desired = self._node, self._desired
        if node is None:
            return None
        body: dict[str, Any] = {}
        annotations = changed_annotations(node, desired)
        if annotations:
            body["metadata"] = {"annotations": annotations}
        if self._condition and (node.network_unavailable or self._condition_uid != node.uid):
            body["status"] = {"conditions": [_network_is_there()]}
        return body or None


def _network_is_there() -> dict[str, str]:
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "type": "NetworkUnavailable",
        "status": "False",
        "reason": "FlannelIsUp",
        "message": "The overlay of this node is up",
        "lastHeartbeatTime": now,
        "lastTransitionTime": now,
    }


def public_ips(
    node: Node, keys: AnnotationKeys, configured: Iterable[str], external: Mapping[IPFamily, ExternalInterface]
) -> dict[IPFamily, str]:
    """Return the addresses that peers send to. Raises ValueError for an invalid annotation."""
    given = {family_of(one): one for one in configured}
    return {
        family: given_public_ip(node, keys, family) or given.get(family) or one.address
        for family, one in external.items()
    }


def hardware_address(
    node: Node, keys: AnnotationKeys, conf: NetConf, family: IPFamily, have: OverlayState, *, derived: bool
) -> str:
    """Return the MAC address of the VXLAN device: as published, as the device has it, or a new one.

    `derived`: peers derive it from the node's name unless it is published.
    """
    vni = conf.backend.vni
    try:
        announced = vtep_mac(node, keys, family, vni)
    except ValueError:
        # The invalid annotation will be overwritten.
        announced = ""
    if announced or derived:
        return announced or derived_mac(node.name, vni, family)
    held = have.devices.get(device_name(family, vni))
    if held is not None and held.kind == "vxlan" and held.mac:
        return held.mac
    fresh = bytearray(os.urandom(6))
    fresh[0] = fresh[0] & 0xFC | 0x02
    return fresh.hex(":")
