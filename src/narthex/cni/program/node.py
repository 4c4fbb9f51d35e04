"""Resources that the plugins of one request share: the node's records, netlink sockets, and the pod's namespace."""

from __future__ import annotations

import posix

from narthex.cni.errors import INVALID_NAMESPACE, UNKNOWN_CONTAINER, CniError
from narthex.cni.kernel import locks, records
from narthex.cni.kernel.locks import AttachmentLock
from narthex.cni.kernel.records import STATE, Records
from narthex.linux.setns import (
    EnteredNamespace,
    is_network_namespace,
    namespace_identity,
    open_namespace,
    own_namespace_identity,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from narthex.cni.kernel.tables import PodTable
    from narthex.cni.plan import SysctlSetting
    from narthex.cni.request import CniRequest
    from narthex.linux.rtnetlink import RtNetlink


class NodeContext:
    """The context of one request at a time, reused for later ones. Not thread-safe.

    Sockets are opened on first use and stay open: closing a netfilter socket waits for deferred work in the kernel.
    """

    def __init__(self, state: str = STATE, wait: float = locks.WAIT_SECONDS) -> None:
        """Use the records in a directory. `wait` limits the seconds for each lock."""
        self.records = Records(state)
        self._wait = wait
        self._state = state
        self._lock = f"{state}/rules.lock"
        self._pod: int | None = None
        self._links: RtNetlink | None = None
        self._masquerade: PodTable | None = None
        self._ports: PodTable | None = None

    @property
    def links(self) -> RtNetlink:
        """Links, addresses, and routes of the node."""
        if self._links is None:
            from narthex.linux.rtnetlink import RtNetlink

            self._links = RtNetlink()
        return self._links

    @property
    def masquerade(self) -> PodTable:
        """The table of masqueraded pods."""
        if self._masquerade is None:
            from narthex.cni.kernel.tables import PodTable
            from narthex.cni.plugins import masquerade

            self._masquerade = PodTable(masquerade.TABLE, masquerade.frame, self._lock)
        return self._masquerade

    @property
    def ports(self) -> PodTable:
        """The table of host ports."""
        if self._ports is None:
            from narthex.cni.kernel.tables import PodTable
            from narthex.cni.plugins import portmap

            self._ports = PodTable(portmap.TABLE, portmap.frame, self._lock)
        return self._ports

    def pod(self, request: CniRequest) -> int:
        """Return the open file of the pod's namespace. Raises CniError if it cannot be opened or is the node's own."""
        if self._pod is None:
            try:
                self._pod = open_namespace(request.namespace)
            except FileNotFoundError:
                message = f"there is no network namespace {request.namespace[:256]}"
                raise CniError(UNKNOWN_CONTAINER, message) from None
            except (OSError, ValueError) as error:
                message = f"cannot open network namespace {request.namespace[:256]!r}: {error}"
                raise CniError(INVALID_NAMESPACE, message) from None
        if not is_network_namespace(self._pod):
            raise CniError(INVALID_NAMESPACE, f"CNI_NETNS {request.namespace[:256]!r} is not a network namespace")
        if namespace_identity(self._pod) == own_namespace_identity():
            message = f"CNI_NETNS {request.namespace[:256]} is the plugin's own network namespace"
            raise CniError(INVALID_NAMESPACE, message)
        return self._pod

    def inside(self, request: CniRequest) -> EnteredNamespace:
        """Return a context manager that enters the pod's namespace. Raises CniError."""
        return EnteredNamespace(self.pod(request))

    def names(self) -> frozenset[str]:
        """Return the names of all interfaces of the node."""
        return frozenset(link.name for link in self.links.links())

    def exclusive(self, kind: int, attachment: str, at_once: bool = False) -> AttachmentLock:
        """Return a context manager that locks a part of an attachment, of which `locks` has the kinds. Raises OSError, CniError.

        All that changes an attachment holds its lock: ADD, DEL, GC, and the agent that restores rules. `at_once`: do not wait.
        """
        from narthex.cni.kernel.tables import owner_of

        return AttachmentLock(self._state, kind, owner_of(attachment), 0.0 if at_once else self._wait)

    def shared(self) -> AttachmentLock:
        """Return a context manager within which no shared element becomes unused. Raises OSError, CniError."""
        return AttachmentLock(self._state, locks.SUBNETS, "", self._wait, shared=True)

    def lasting(
        self, kind: str, lock: int, close: Callable[[NodeContext, str, dict[str, object]], None]
    ) -> Iterator[str]:
        """Yield attachments with nftables rules; `close` those whose namespace is gone. Raises OSError, CniError."""
        names = self.names()
        for attachment, record in list(self.records.all(kind)):
            if record.get("backend") != "nftables":
                continue
            if not self._is_gone(attachment, names):
                yield attachment
                continue
            with self.exclusive(lock, attachment):
                again = self.records.get(kind, attachment)
                # A new ADD may have replaced both records.
                if again is not None and self._is_gone(attachment, names):
                    close(self, attachment, again)

    def _is_gone(self, attachment: str, names: frozenset[str]) -> bool:
        pod = self.records.get(records.PODS, attachment)
        return pod is not None and records.is_gone(pod, names)

    def begin(self, pod: int | None) -> None:
        """Begin a request. `pod` is the open file of the pod's namespace, if the client has sent it."""
        self.end()
        self._pod = pod

    def end(self) -> None:
        """End a request: close the pod's namespace."""
        if self._pod is not None:
            posix.close(self._pod)
            self._pod = None

    def close(self) -> None:
        """Close everything. Later use opens it again."""
        for one in (self._links, self._masquerade, self._ports):
            if one is not None:
                one.close()
        self._links = self._masquerade = self._ports = None
        self.end()


def apply_settings(settings: Iterable[SysctlSetting]) -> None:
    """Apply sysctls in the calling thread's network namespace.

    Settings that are not required may be missing or refused, for example without IPv6. Raises OSError with the setting's path.
    """
    for setting in settings:
        path = f"/proc/sys/{setting.path}"
        try:
            descriptor = posix.open(path, posix.O_RDWR | posix.O_CLOEXEC)
            try:
                # Skip unchanged values: the file may not be writable.
                if posix.read(descriptor, 64).strip().decode() != setting.value:
                    posix.pwrite(descriptor, setting.value.encode(), 0)
            finally:
                posix.close(descriptor)
        except OSError as error:
            if setting.required:
                raise OSError(error.errno, f"cannot set {setting.path} to {setting.value}: {error.strerror}") from None
