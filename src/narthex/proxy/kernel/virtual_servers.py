"""The kernel's IPVS: schedulers (row 24.1), timeouts (row 24.7), and virtual servers with draining (rows 24.8, 24.9)."""

from __future__ import annotations

import errno
import math
import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress

import msgspec

from narthex.linux.genetlink import Genetlink, GenetlinkRequest
from narthex.linux.netlink import DumpInterrupted, NetlinkError
from narthex.model import IPFamily, Protocol, family_of, join_port
from narthex.netfilter.ipvs import RealServer, ServerKey, VirtualServer
from narthex.netfilter.netlink.ipvs import (
    IPVS_FAMILY,
    IpvsCommand,
    IpvsTimeouts,
    KernelRealServer,
    read_real,
    read_server,
    read_timeouts,
    real_attributes,
    server_attributes,
    server_key_attributes,
    timeout_attributes,
)
from narthex.proxy.backends.base import ApplyError
from narthex.proxy.backends.ipvs.rules import RealChanges

TEND_SECONDS = 60.0
"""Interval of the check of draining real servers (row 24.8)."""
_READ_ATTEMPTS = 10
_GONE = (errno.ESRCH, errno.ENOENT)
_EDITS = {IpvsCommand.NEW_SERVER: IpvsCommand.SET_SERVER, IpvsCommand.NEW_REAL: IpvsCommand.SET_REAL}
"""Of each command that makes an object, the one that edits it."""
_DELETES = (IpvsCommand.DELETE_SERVER, IpvsCommand.DELETE_REAL)

Place = tuple[str, int]
"""Address and port of a real server."""
_PROBE = ("198.51.100.0", Protocol.TCP, 20000)
"""An address of TEST-NET-2 (RFC 5737), which no network uses."""


class NoIpvsError(ApplyError):
    """The kernel has no IPVS, or does not permit its use."""


def connect(namespace: str | None = None) -> Genetlink:
    """Return a socket for IPVS; the kernel loads the module if it can. Raises NoIpvsError."""
    try:
        return Genetlink(IPVS_FAMILY, namespace)
    except NetlinkError as error:
        raise NoIpvsError(
            "this kernel has no IP_VS (module ip_vs)"
            if error.errno == errno.ENOENT
            else f"this kernel's IP_VS cannot be used: {error.strerror}"
        ) from error


def check_scheduler(name: str, namespace: str | None = None) -> None:
    """Check that the kernel has a scheduler, and let it load the module.

    Unless a virtual server uses the scheduler already, one is created for a moment. Raises ApplyError, NoIpvsError.
    """
    link = connect(namespace)
    try:
        if name in _in_use(link):
            return
        probe = VirtualServer(address=_PROBE[0], protocol=_PROBE[1], port=_PROBE[2], scheduler=name)
        taken_away = IpvsCommand.DELETE_SERVER, server_key_attributes(probe.key)
        # One that a killed proxy has left would be in the way.
        _, made, _ = link.write([taken_away, (IpvsCommand.NEW_SERVER, server_attributes(probe)), taken_away])
    except OSError as error:
        raise ApplyError(f"cannot ask the kernel for the scheduler {name!r}: {error}") from error
    finally:
        link.close()
    if made is not None and made.errno == errno.ENOENT:
        raise ApplyError(f"this kernel has no IPVS scheduler {name!r} (module ip_vs_{name})")
    if made is not None:
        raise ApplyError(f"this kernel's IPVS does not take the scheduler {name!r}: {made.strerror}")


def missing_schedulers(names: Iterable[str]) -> frozenset[str]:
    """Return those of the schedulers that the kernel does not have; all if it has no IPVS."""
    missing = set()
    for name in names:
        try:
            check_scheduler(name)
        except ApplyError:
            missing.add(name)
    return frozenset(missing)


def set_timeouts(desired: IpvsTimeouts, namespace: str | None = None) -> IpvsTimeouts | None:
    """Set the timeouts that are not 0. Returns the previous ones, None if nothing changes. Raises ApplyError."""
    if not any(desired):
        return None
    link = connect(namespace)
    try:
        was = read_timeouts(link.ask(IpvsCommand.GET_TIMEOUTS))
        # The kernel takes a 0 for "as it is".
        if all(new in (0, old) for new, old in zip(desired, was, strict=True)):
            return None
        (error,) = link.write([(IpvsCommand.SET_TIMEOUTS, timeout_attributes(desired))])
    except OSError as failed:
        raise ApplyError(f"cannot set the time-outs of IPVS: {failed}") from failed
    finally:
        link.close()
    if error is not None:
        raise ApplyError(f"cannot set the time-outs of IPVS: {error.strerror}")
    return was


def _in_use(link: Genetlink) -> set[str]:
    found = set()
    try:
        for body in link.listing(IpvsCommand.GET_SERVER):
            held = read_server(body)
            if held is not None:
                found.add(held.server.scheduler)
    except DumpInterrupted:
        pass
    return found


class IpvsServers:
    """Virtual servers of one namespace (None: the current one). Not thread-safe."""

    def __init__(self, family: IPFamily, namespace: str | None = None, patience: float = TEND_SECONDS) -> None:
        """Create the accessor; `patience` is the interval in seconds of the check of draining real servers."""
        self._family = family
        self._namespace = namespace
        self._patience = patience
        self._look_at = -math.inf
        self._socket: Genetlink | None = None
        self._leaving: dict[ServerKey, set[Place]] = {}
        """Real servers that nothing new is sent to, and that are removed with their last connection."""

    def read(self, ours: Callable[[ServerKey], bool]) -> dict[ServerKey, VirtualServer]:
        """Return the virtual servers for which `ours` returns True, with their real servers in service.

        A real server with weight 0, or with another forwarding method than masquerading, counts as leaving. Raises
        ApplyError.
        """
        for _ in range(_READ_ATTEMPTS):
            try:
                return self._read(ours)
            except DumpInterrupted:
                continue
            except OSError as error:
                # A virtual server that went away meanwhile has no real servers to list.
                if error.errno not in _GONE:
                    raise self._failed("cannot read the virtual servers", error) from error
        raise ApplyError("cannot read the virtual servers: other programs keep changing them")

    def _read(self, ours: Callable[[ServerKey], bool]) -> dict[ServerKey, VirtualServer]:
        held = [read_server(body) for body in self._link().listing(IpvsCommand.GET_SERVER)]
        found: dict[ServerKey, VirtualServer] = {}
        leaving: dict[ServerKey, set[Place]] = {}
        for each in held:
            if each is None or family_of(each.server.address) is not self._family or not ours(each.server.key):
                continue
            server = each.server
            reals = [one.real for one in self._reals(server.key)]
            serving = [real for real in reals if _serves(real)]
            if gone := {(real.address, real.port) for real in reals if not _serves(real)}:
                leaving[server.key] = gone
            found[server.key] = VirtualServer(
                address=server.address,
                protocol=server.protocol,
                port=server.port,
                # Settings that no plan has make the next sync write it again.
                scheduler=f"{server.scheduler} ({each.oddities})" if each.oddities else server.scheduler,
                persistence_seconds=server.persistence_seconds,
                hash_ports=server.hash_ports,
                reals=tuple(sorted(serving, key=lambda real: real.sort_key)),
            )
        self._leaving = leaving
        return found

    def _reals(self, key: ServerKey) -> list[KernelRealServer]:
        return [read_real(body) for body in self._link().listing(IpvsCommand.GET_REAL, server_key_attributes(key))]

    def change(
        self,
        added: Sequence[VirtualServer] = (),
        edited: Sequence[VirtualServer] = (),
        removed: Sequence[ServerKey] = (),
        reals: Mapping[ServerKey, RealChanges] | None = None,
    ) -> None:
        """Add, edit, and remove virtual servers and real servers, one message each, in few datagrams.

        Objects that exist already are edited; objects that are gone already are no error. Raises ApplyError.
        """
        requests = [_Request(IpvsCommand.DELETE_SERVER, key) for key in removed]
        requests += [_Request(IpvsCommand.SET_SERVER, each.key, server=each) for each in edited]
        for each in added:
            requests.append(_Request(IpvsCommand.NEW_SERVER, each.key, server=each))
            # A round begins with the one that came last. Nodes must not all begin with the same.
            reals_of_it = random.sample(each.reals, len(each.reals))
            requests += (_Request(IpvsCommand.NEW_REAL, each.key, real) for real in reals_of_it)
        for key, change in (reals or {}).items():
            requests += self._real_requests(key, change)
        refused = self._send(requests)
        taken = [one.server for one in refused if one.command is IpvsCommand.NEW_SERVER and one.server]
        again = [one.edit() for one in refused]
        if again and (still := self._send(again)):
            raise ApplyError(f"{still[0].name}: it is there, yet it cannot be edited")
        for server in taken:
            self._let_go_of_others(server)
        for key in removed:
            self._leaving.pop(key, None)
        self._note_returned(added, reals or {})
        self._release({key for key, change in (reals or {}).items() if change.removed})

    def _real_requests(self, key: ServerKey, change: RealChanges) -> Iterable[_Request]:
        """Yield the new real servers first, so that a virtual server whose endpoints are all replaced always has some."""
        for real in change.added:
            yield _Request(IpvsCommand.NEW_REAL, key, real)
        for real in change.edited:
            yield _Request(IpvsCommand.SET_REAL, key, real)
        gentle = key[1] is Protocol.TCP
        for real in change.removed:
            if gentle:
                self._leaving.setdefault(key, set()).add((real.address, real.port))
                yield _Request(IpvsCommand.SET_REAL, key, RealServer(real.address, real.port, 0))
            else:
                yield _Request(IpvsCommand.DELETE_REAL, key, real)

    def _note_returned(self, added: Sequence[VirtualServer], reals: Mapping[ServerKey, RealChanges]) -> None:
        """Stop draining real servers that are added again."""
        back = [(each.key, real) for each in added for real in each.reals]
        back += [(key, real) for key, change in reals.items() for real in change.added]
        for key, real in back:
            leaving = self._leaving.get(key, set())
            leaving.discard((real.address, real.port))
            if not leaving:
                self._leaving.pop(key, None)

    def _let_go_of_others(self, server: VirtualServer) -> None:
        """Drain unknown real servers of a virtual server that existed before we added it."""
        desired = {(real.address, real.port) for real in server.reals}
        others = [one.real for one in self._listed(server.key) if (one.real.address, one.real.port) not in desired]
        if others:
            self.change(reals={server.key: RealChanges(removed=tuple(others))})

    def _send(self, requests: list[_Request]) -> list[_Request]:
        """Send requests. Returns those that failed because the object exists already.

        Raises ApplyError for other refusals of the kernel, after all requests were tried.
        """
        if not requests:
            return []
        try:
            answers = self._link().write([each.message for each in requests])
        except OSError as error:
            raise self._failed("cannot write virtual servers", error) from error
        there: list[_Request] = []
        failed: list[str] = []
        for request, answer in zip(requests, answers, strict=True):
            if answer is None or (request.command in _DELETES and answer.errno in _GONE):
                continue
            if answer.errno == errno.EEXIST and request.command in _EDITS:
                there.append(request)
            else:
                failed.append(f"{request.name}: {request.why(answer)}")
        if failed:
            more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
            raise ApplyError(f"{failed[0]}{more}")
        return there

    def tend(self) -> float | None:
        """Remove draining real servers without connections. Returns the seconds until the next call, or None.

        Refused removals are tried again.
        """
        now = time.monotonic()
        if self._leaving and now >= self._look_at:
            self._look_at = now + self._patience
            # A kernel that refuses everything lets the next sync fail, which is logged.
            with suppress(ApplyError):
                self._release(set(self._leaving))
        return self._look_at - now if self._leaving else None

    def _release(self, keys: Collection[ServerKey]) -> None:
        """Remove the draining real servers of some virtual servers that have no connections."""
        requests = []
        for key in keys:
            leaving = self._leaving.get(key, set())
            held = {(one.real.address, one.real.port): one for one in self._listed(key)} if leaving else {}
            # Another program may have given one a weight again, or removed it: then it is not for us to remove.
            leaving &= {place for place, one in held.items() if not _serves(one.real)}
            gone = {place for place in leaving if not held[place].connections or key[1] is not Protocol.TCP}
            requests += [_Request(IpvsCommand.DELETE_REAL, key, held[place].real) for place in sorted(gone)]
            leaving -= gone
            if not leaving:
                self._leaving.pop(key, None)
        self._send(requests)

    def _listed(self, key: ServerKey) -> list[KernelRealServer]:
        """Return the current real servers of a virtual server; empty if it is gone."""
        for _ in range(_READ_ATTEMPTS):
            try:
                return self._reals(key)
            except DumpInterrupted:
                continue
            except OSError as error:
                if error.errno in _GONE:
                    return []
                raise self._failed(f"cannot read {_named(key)}", error) from error
        raise ApplyError(f"cannot read {_named(key)}: other programs keep changing it")

    def _link(self) -> Genetlink:
        if self._socket is None:
            self._socket = connect(self._namespace)
        return self._socket

    def _failed(self, what: str, error: OSError) -> ApplyError:
        """Return the error to raise, and close the socket; the next call opens another."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        return ApplyError(f"{what}: {error}")


class _Request(msgspec.Struct, frozen=True):
    """One message to the kernel, about a virtual server or one of its real servers."""

    command: IpvsCommand
    key: ServerKey
    real: RealServer | None = None
    server: VirtualServer | None = None

    @property
    def message(self) -> GenetlinkRequest:
        """Return the generic netlink command and its attributes."""
        if self.server is not None:
            return self.command, server_attributes(self.server)
        return self.command, real_attributes(self.key, self.real) if self.real is not None else server_key_attributes(
            self.key
        )

    @property
    def name(self) -> str:
        """Return the name of the virtual or real server, for error messages."""
        if self.real is None:
            return _named(self.key)
        return f"real server {join_port(self.real.address, self.real.port)} of {_named(self.key)}"

    def edit(self) -> _Request:
        """Return the request that edits the object that exists already."""
        return msgspec.structs.replace(self, command=_EDITS[self.command])

    def why(self, error: NetlinkError) -> str:
        """Return the meaning of the kernel's error for this request."""
        if self.server is not None and error.errno == errno.ENOENT:
            name = self.server.scheduler
            return f"the kernel has no scheduler {name!r} and cannot load one (module ip_vs_{name})"
        return error.strerror or str(error)


def _serves(real: RealServer) -> bool:
    return real.weight > 0 and real.forward == "masquerade"


def _named(key: ServerKey) -> str:
    address, protocol, port = key
    return f"virtual server {join_port(address, port)}/{protocol.value}"
