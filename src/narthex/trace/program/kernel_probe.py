"""A probe packet, followed by the kernel's own tracing (`nft monitor trace`) and compared with the predicted path.

A table `narthex-probe` marks the first packet of one flow, given by addresses and both ports, for tracing; it changes no packet. The
kernel ties the table to this process (`flags owner`) and removes it when the process ends. iptables with the nf_tables backend is
traced, too; iptables-legacy is not, because its TRACE goes to the kernel's log, which a network namespace can't read.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

import msgspec

from narthex.linux.addresses import own_addresses
from narthex.linux.libnftables import NftError, NftMissingError, OwnedTables
from narthex.linux.namespaces import in_namespace, namespace_names
from narthex.linux.run import StartedProgram, start_program
from narthex.model import IPFamily, Protocol, contains, family_of, join_port
from narthex.netfilter.dump.kernel_trace import KernelTrace, parse, probe_traces
from narthex.trace.document import ProbeRecord
from narthex.trace.follow import align
from narthex.trace.follow.align import Alignment
from narthex.trace.model import PacketPath
from narthex.trace.program.places import TraceError

TABLE = "narthex-probe"
DEADLINE = 30.0
"""Seconds to wait for the monitor's start, and for the packet's first trace."""
_READ_SECONDS = 0.25
"""Timeout of one read of the monitor's output."""
ANSWER_SECONDS = 3.0
"""Seconds to wait for a response to the packet."""
_SOCKETS = {IPFamily.IPV4: socket.AF_INET, IPFamily.IPV6: socket.AF_INET6}
_LOOPBACK = {IPFamily.IPV4: "127.0.0.1", IPFamily.IPV6: "::1"}
_RST_ON_CLOSE = struct.pack("ii", 1, 0)
_TCP_SYNCNT = 7
_KNOCK_PORT = 9
"""The discard service; the packet never leaves the output hook."""
_ECHO_REQUEST = {IPFamily.IPV4: 8, IPFamily.IPV6: 128}
_ICMP = {IPFamily.IPV4: socket.IPPROTO_ICMP, IPFamily.IPV6: socket.IPPROTO_ICMPV6}


class KernelProbeError(RuntimeError):
    """No packet could be sent or followed; the message says why, and what would help."""


class KernelProbe(msgspec.Struct, frozen=True, kw_only=True):
    """The packet to send, where to send it from, and where to watch it."""

    source: str
    destination: str
    port: int = 0
    protocol: Protocol = Protocol.TCP
    sender: str | None = None
    """Named network namespace that has the source address; None: the current one."""
    node: str | None = None
    """Named network namespace whose rules are watched; None: the current one."""


class ProbeOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to the packet."""

    flow: str
    """`tcp 10.244.0.5:41234 -> 10.96.0.10:80`."""
    trace: KernelTrace | None
    """None: it didn't reach the node's hooks."""
    answer: str
    """`connected`, `answered`, `refused`, `unreachable`, or `nothing`."""


def probe(asked: KernelProbe, deadline: float = DEADLINE, patience: float = ANSWER_SECONDS) -> ProbeOutcome:
    """Send one packet and follow it. Raises KernelProbeError.

    Args:
        asked: The packet.
        deadline: Timeout of each wait for the kernel's tracing, in seconds.
        patience: Seconds to wait for a response to the packet.
    """
    family = family_of(asked.destination)
    with in_namespace(asked.sender):
        sender = _Sender(asked, family)
    with closing(sender):
        rules = _rules(asked, family, sender.port)
        with _tables(rules, asked.node), closing(_Monitor(asked.node, family, deadline)) as monitor:
            sender.send()
            answer = sender.answer(patience)
            trace = monitor.first(deadline if answer in ("connected", "answered") else min(deadline, patience))
    port = f":{sender.port}" if sender.port and ":" not in asked.source else ""
    to = join_port(asked.destination, asked.port) if asked.port else asked.destination
    return ProbeOutcome(flow=f"{asked.protocol.lower} {asked.source}{port} -> {to}", trace=trace, answer=answer)


@contextmanager
def _tables(definition: str, namespace: str | None) -> Iterator[None]:
    try:
        with in_namespace(namespace):
            tables = OwnedTables(definition)
    except FileNotFoundError:
        raise KernelProbeError(f"there is no network namespace {namespace}") from None
    except NftMissingError as error:
        raise KernelProbeError(str(error)) from error
    except NftError as error:
        raise KernelProbeError(
            f"the table {TABLE} could not be made: {error} (root is needed, and only one probe at a time in a namespace)"
        ) from error
    try:
        yield
    finally:
        tables.close()


def _rules(asked: KernelProbe, family: IPFamily, source_port: int) -> str:
    word = family.nft
    flow = f"{word} saddr {asked.source} {word} daddr {asked.destination} "
    if asked.protocol is Protocol.ICMP:
        flow += f"meta l4proto {'icmp' if family is IPFamily.IPV4 else 'ipv6-icmp'}"
    else:
        flow += f"{asked.protocol.lower} sport {source_port} {asked.protocol.lower} dport {asked.port}"
    knock = f"{word} daddr {_LOOPBACK[family]} udp dport {_KNOCK_PORT} meta nftrace set 1 drop"
    return (
        f"table {word} {TABLE} {{\n\tflags owner\n"
        f"\tchain knock {{\n\t\ttype filter hook output priority -500\n\t\t{knock}\n\t}}\n"
        f"\tchain made-here {{\n\t\ttype filter hook output priority -450\n\t\t{flow} meta nftrace set 1\n\t}}\n"
        f"\tchain comes-in {{\n\t\ttype filter hook prerouting priority -450\n\t\t{flow} meta nftrace set 1\n\t}}\n"
        f"}}\n"
    )


class _Sender:
    """The packet's socket; create it in the sender's network namespace."""

    def __init__(self, asked: KernelProbe, family: IPFamily) -> None:
        self._asked, self._family = asked, family
        self._raw = asked.protocol is Protocol.ICMP
        if asked.protocol is Protocol.SCTP:
            raise KernelProbeError("a probe is of TCP, UDP or ICMP: SCTP would load a module into the kernel")
        kind = {Protocol.TCP: socket.SOCK_STREAM, Protocol.UDP: socket.SOCK_DGRAM}.get(asked.protocol, socket.SOCK_RAW)
        try:
            self._socket = socket.socket(_SOCKETS[family], kind, _ICMP[family] if self._raw else 0)
        except OSError as error:
            raise KernelProbeError(f"no socket to send from: {error.strerror} (root is needed)") from error
        try:
            self._socket.setblocking(False)
            if asked.protocol is Protocol.TCP:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST_ON_CLOSE)
                self._socket.setsockopt(socket.IPPROTO_TCP, _TCP_SYNCNT, 1)
            self._socket.bind((asked.source, 0))
        except OSError as error:
            self._socket.close()
            raise KernelProbeError(
                f"cannot send from {asked.source}: {error.strerror}; a probe is sent where the address is"
            ) from error
        self.port: int = 0 if self._raw else self._socket.getsockname()[1]
        self._failed = 0

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def send(self) -> None:
        """Send the packet."""
        to = self._asked.destination, 0 if self._raw else self._asked.port
        self._failed = self._socket.connect_ex(to)
        if self._failed in (0, errno.EINPROGRESS):
            self._failed = 0
            if self._asked.protocol is not Protocol.TCP:
                try:
                    self._socket.send(self._echo() if self._raw else b"narthex probe")
                except OSError as error:
                    self._failed = error.errno or 0

    def _echo(self) -> bytes:
        head = struct.pack("!BBHHH", _ECHO_REQUEST[self._family], 0, 0, os.getpid() & 0xFFFF, 1)
        total = sum(struct.unpack("!4H", head))
        total = (total & 0xFFFF) + (total >> 16)
        checksum = 0 if self._family is IPFamily.IPV6 else ~total & 0xFFFF  # the kernel writes ICMPv6's
        return head[:2] + struct.pack("!H", checksum) + head[4:]

    def answer(self, seconds: float) -> str:
        """Wait for the response."""
        if self._failed:
            return _refusal(self._failed)
        poll = select.poll()
        tcp = self._asked.protocol is Protocol.TCP
        poll.register(self._socket, select.POLLOUT if tcp else select.POLLIN)
        if not poll.poll(seconds * 1000):
            return "nothing"
        number = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            return _refusal(number)
        return "connected" if tcp else "answered"


def _refusal(number: int) -> str:
    if number == errno.ECONNREFUSED:
        return "refused"
    return "nothing" if number in (errno.ETIMEDOUT, errno.EPERM) else "unreachable"


class _Monitor:
    """A running `nft monitor trace` in a namespace.

    It doesn't report when it starts to listen, so packets to loopback that our table drops are sent until it reports one.
    """

    def __init__(self, namespace: str | None, family: IPFamily, deadline: float) -> None:
        self._namespace, self._family, self._deadline = namespace, family, deadline
        self._held = b""
        try:
            self._program: StartedProgram[bytes] = start_program(
                ["nft", "-a", "-n", "monitor", "trace"], namespace=self._namespace
            )
        except FileNotFoundError:
            raise KernelProbeError("nft is not installed: the package is called nftables") from None
        try:
            self._reach()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the program."""
        self._program.kill()
        self._program.wait()
        if self._program.stdout:
            self._program.stdout.close()

    def _reach(self) -> None:
        """Send packets to loopback until the monitor reports one of them. Raises KernelProbeError.

        The monitor reports packets in order, so it has then reported every earlier packet in full.
        """
        end = time.monotonic() + self._deadline
        with in_namespace(self._namespace):
            knocker = socket.socket(_SOCKETS[self._family], socket.SOCK_DGRAM)
        with knocker:
            knocker.bind((_LOOPBACK[self._family], 0))
            # Packets of an earlier call may still be on their way.
            mine = f"udp sport {knocker.getsockname()[1]} udp dport {_KNOCK_PORT} ".encode()
            while mine not in self._held:
                with suppress(PermissionError):  # The rule of the table drops it.
                    knocker.sendto(b"", (_LOOPBACK[self._family], _KNOCK_PORT))
                self._read(0.02)
                if self._program.poll() is not None:
                    said = self._held.decode(errors="replace").strip()
                    raise KernelProbeError(f"nft monitor trace ended: {said or 'without a word'}")
                if time.monotonic() > end:
                    raise KernelProbeError("nft monitor trace reported no packet in time: is loopback up?")

    def _read(self, seconds: float) -> bool:
        assert self._program.stdout is not None
        ready, _, _ = select.select([self._program.stdout], [], [], seconds)
        if ready:
            data = os.read(self._program.stdout.fileno(), 1 << 16)
            self._held += data
            return bool(data)
        return False

    def first(self, deadline: float) -> KernelTrace | None:
        """Return the path of the first packet that the table marked, or None if there was none within `deadline` seconds."""
        end = time.monotonic() + deadline
        while True:
            self._reach()
            found = self._traces()
            if found is not None or time.monotonic() >= end:
                return found
            self._read(_READ_SECONDS)

    def _traces(self) -> KernelTrace | None:
        whole = self._held[: self._held.rfind(b"\n") + 1].decode(errors="replace")
        traces = probe_traces(parse(whole.splitlines()), TABLE)
        return next((trace for trace in traces if trace.probe_chain in ("made-here", "comes-in")), None)


class ProbeComparison(msgspec.Struct, frozen=True, kw_only=True):
    """A probe's outcome and its comparison with the prediction."""

    probed: ProbeOutcome
    alignment: Alignment


def send(
    path: PacketPath,
    *,
    sender: str | None,
    node: str | None,
    node_name: str = "",
    deadline: float = DEADLINE,
    patience: float = ANSWER_SECONDS,
) -> ProbeComparison:
    """Send the path's packet. Raises TraceError.

    `sender` and `node` are named network namespaces, None the current one; `node_name` says which node's part of the path is compared.
    `deadline` and `patience` are those of `probe`.
    """
    packet = path.packet
    asked = KernelProbe(
        source=packet.source,
        destination=packet.destination,
        port=packet.port,
        protocol=Protocol(packet.protocol.upper()),
        sender=sender,
        node=node,
    )
    try:
        probed = probe(asked, deadline, patience)
    except KernelProbeError as error:
        raise TraceError(f"the probe: {error}") from error
    alignment = align.with_answer(align.align(path, probed.trace, node_name), path, probed.answer)
    return ProbeComparison(probed=probed, alignment=alignment)


def sender_of(address: str, node: str | None) -> str | None:
    """Return the named network namespace that has an address; `node` is the node's own. Raises TraceError."""
    if contains(family_of(address).loopback, address):
        return node
    for name in (node, *(each for each in namespace_names() if each != node)):
        try:
            with in_namespace(name):
                if any(each.address == address for each in own_addresses()):
                    return name
        except OSError:
            continue  # it has gone meanwhile
    raise TraceError(
        f"the probe: no network namespace of this machine has {address}, so the packet cannot be sent from here; pods of "
        "this node and the node itself can be senders"
    )


def probe_text(tried: ProbeComparison) -> str:
    """Return the result as text that ends with a newline."""
    answer = {"nothing": "nothing came back", "connected": "it was accepted"}.get(
        tried.probed.answer, tried.probed.answer
    )
    head = f"probe: {tried.probed.flow}: {answer}; the kernel reports:\n"
    return head + align.text(tried.alignment)


def probe_record(tried: ProbeComparison) -> ProbeRecord:
    """Return the result as part of a document."""
    return ProbeRecord(flow=tried.probed.flow, answer=tried.probed.answer, **msgspec.structs.asdict(tried.alignment))
