"""What the plugins of one request share: the node's records, its netlink sockets, the pod's namespace."""

from __future__ import annotations

import posix

from narthex.cni.errors import INVALID_NAMESPACE, UNKNOWN_CONTAINER, CniError
from narthex.cni.kernel.records import STATE, Records
from narthex.linux import setns

TYPE_CHECKING = False
if TYPE_CHECKING:
    from narthex.cni.kernel.tables import PodTable
    from narthex.cni.request import CniRequest
    from narthex.linux.rtnetlink import RtNetlink


class NodeContext:
    """One request's view of the node, of one request after another. Sockets are opened when they are first used, and
    stay: to close one of netfilter's waits for what the kernel still has to free. Not for several threads at once."""

    def __init__(self, state: str = STATE) -> None:
        self.records = Records(state)
        self._lock = f"{state}/rules.lock"
        self._pod: int | None = None
        self._links: RtNetlink | None = None
        self._masquerade: PodTable | None = None
        self._ports: PodTable | None = None

    @property
    def links(self) -> RtNetlink:
        """Links, addresses and routes of the node."""
        if self._links is None:
            from narthex.linux.rtnetlink import RtNetlink

            self._links = RtNetlink()
        return self._links

    @property
    def masquerade(self) -> PodTable:
        """The table of pods that are masqueraded."""
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
        """The open file of the pod's namespace. Raises CniError when it cannot be opened or is the node's own."""
        if self._pod is None:
            try:
                self._pod = setns.open_namespace(request.namespace)
            except FileNotFoundError:
                message = f"there is no network namespace {request.namespace[:256]}"
                raise CniError(UNKNOWN_CONTAINER, message) from None
            except (OSError, ValueError) as error:
                message = f"cannot open network namespace {request.namespace[:256]!r}: {error}"
                raise CniError(INVALID_NAMESPACE, message) from None
        if not setns.is_network(self._pod):
            raise CniError(INVALID_NAMESPACE, f"CNI_NETNS {request.namespace[:256]!r} is not a network namespace")
        if setns.identity(self._pod) == setns.own_identity():
            message = f"CNI_NETNS {request.namespace[:256]} is the plugin's own network namespace"
            raise CniError(INVALID_NAMESPACE, message)
        return self._pod

    def inside(self, request: CniRequest) -> setns.EnteredNamespace:
        """The pod's namespace, to be entered. Raises CniError."""
        return setns.EnteredNamespace(self.pod(request))

    def names(self) -> frozenset[str]:
        """Names of all interfaces of the node."""
        return frozenset(link.name for link in self.links.links())

    def begin(self, pod: int | None) -> None:
        """A request begins. `pod` is the open file of the pod's namespace, when whoever asks has sent it."""
        self.end()
        self._pod = pod

    def end(self) -> None:
        """A request has ended: close the pod's namespace."""
        if self._pod is not None:
            posix.close(self._pod)
            self._pod = None

    def close(self) -> None:
        """Close everything. What is used after that is opened anew."""
        for one in (self._links, self._masquerade, self._ports):
            if one is not None:
                one.close()
        self._links = self._masquerade = self._ports = None
        self.end()
