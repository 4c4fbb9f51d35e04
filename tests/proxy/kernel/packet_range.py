"""A node between a sender and a receiver, and packets shot through it: many rule sets at once, one packet for each.

The sender writes whole IP packets; a packet's number is in the IP header's identification, which no rule changes. The receiver
and the node's own sockets see what is let through, the sender sees what is refused. Everything happens on one processor,
so packets overtake no other, and a last one that is let through says that all others are done.
"""

import itertools
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from narthex.linux.namespaces import create_namespace, delete_namespace, in_namespace
from narthex.linux.run import run

_numbers = itertools.count()
SENDERS, RECEIVERS = "10.50.0.0/16", "10.61.0.0/16"
OWN = ("10.60.0.1", "10.61.0.1")
"""The node's addresses, towards the sender and towards the receiver."""
IIF, OIF = "nxcl0", "nxsv0"
_LAST = 0xFFFE
_PATIENCE = 60.0
_PROTOCOLS = {"tcp": 6, "udp": 17, "icmp": 1}
_SETTINGS = {
    "net/ipv4/ip_forward": "1",
    "net/ipv4/conf/all/rp_filter": "0",
    "net/ipv4/conf/default/rp_filter": "0",
    "net/ipv4/conf/all/send_redirects": "0",
    "net/ipv4/icmp_ratemask": "0",
    "net/ipv4/icmp_echo_ignore_all": "0",
}


class Shot:
    """A packet to send."""

    def __init__(self, source: str, destination: str, protocol: str, port: int = 0, source_port: int = 0) -> None:
        self.source, self.destination, self.protocol = source, destination, protocol
        self.port, self.source_port = port, source_port

    def __repr__(self) -> str:
        return f"{self.protocol} {self.source}:{self.source_port} -> {self.destination}:{self.port}"

    def packed(self, number: int) -> bytes:
        """The whole packet."""
        body = {"tcp": self._tcp, "udp": self._udp, "icmp": self._icmp}[self.protocol](number)
        ends = socket.inet_aton(self.source), socket.inet_aton(self.destination)
        head = struct.pack(">BBHHHBBH4s4s", 0x45, 0, 20 + len(body), number, 0, 64, _PROTOCOLS[self.protocol], 0, *ends)
        return head[:10] + _sum(head) + head[12:] + body

    def _pseudo(self, length: int) -> bytes:
        ends = socket.inet_aton(self.source) + socket.inet_aton(self.destination)
        return ends + struct.pack(">BBH", 0, _PROTOCOLS[self.protocol], length)

    def _tcp(self, number: int) -> bytes:
        body = struct.pack(">HHIIBBHHH", self.source_port, self.port, number, 0, 0x50, 2, 1024, 0, 0)
        return body[:16] + _sum(self._pseudo(len(body)) + body) + body[18:]

    def _udp(self, _number: int) -> bytes:
        body = struct.pack(">HHHH", self.source_port, self.port, 12, 0) + b"shot"
        return body[:6] + _sum(self._pseudo(len(body)) + body) + body[8:]

    def _icmp(self, number: int) -> bytes:
        body = struct.pack(">BBHHH", 8, 0, 0, number, 1)
        return body[:2] + _sum(body) + body[4:]


def _sum(data: bytes) -> bytes:
    total = sum(struct.unpack(f">{len(data) // 2}H", data))
    total = (total >> 16) + (total & 0xFFFF)
    return struct.pack(">H", ~(total + (total >> 16)) & 0xFFFF)


class Range:
    """The three namespaces."""

    def __init__(self) -> None:
        name = f"nxr-{os.getpid()}-{next(_numbers)}"
        self.sender, self.node, self.receiver = (f"{name}-{part}" for part in ("c", "n", "s"))
        self._made: list[str] = []

    def __enter__(self) -> "Range":
        try:
            self._lay()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._made:
            delete_namespace(name)

    def _lay(self) -> None:
        for name in (self.sender, self.node, self.receiver):
            create_namespace(name)
            self._made.append(name)
        self._ip(
            self.node,
            f"link add {IIF} address 02:00:00:00:00:01 type veth peer name c0 address 02:00:00:00:00:02 netns {self.sender}",
            f"link add {OIF} address 02:00:00:00:00:03 type veth peer name s0 address 02:00:00:00:00:04 netns {self.receiver}",
            *(f"link set {link} up" for link in (IIF, OIF)),
            f"address add {OWN[0]}/24 dev {IIF}",
            f"address add {OWN[1]}/24 dev {OIF}",
            f"neighbour add 10.60.0.2 lladdr 02:00:00:00:00:02 nud permanent dev {IIF}",
            f"neighbour add 10.61.0.2 lladdr 02:00:00:00:00:04 nud permanent dev {OIF}",
            f"route add {SENDERS} via 10.60.0.2",
            f"route add {RECEIVERS} via 10.61.0.2",
            "route add 10.61.0.0/25 via 10.61.0.2",
            "route add 10.61.0.128/25 via 10.61.0.2",
        )
        self._ip(
            self.sender,
            "link set c0 up",
            "address add 10.60.0.2/24 dev c0",
            f"neighbour add {OWN[0]} lladdr 02:00:00:00:00:01 nud permanent dev c0",
            f"route add default via {OWN[0]}",
        )
        self._ip(self.receiver, "link set s0 up")
        with in_namespace(self.node):
            for path, value in _SETTINGS.items():
                Path(f"/proc/sys/{path}").write_text(value)

    def _ip(self, namespace: str, *lines: str) -> None:
        run(["ip", "-batch", "-"], stdin="".join(line + "\n" for line in lines), namespace=namespace)

    def shoot(self, shots: Sequence[Shot]) -> list[Any]:
        """Send all; for each what was seen: ("there" or "here", destination, port, source), "refused", or "nothing"."""
        seen: list[Any] = [None] * len(shots)
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(before)})
        sockets: list[Any] = [*self._ears()]
        try:
            with in_namespace(self.sender):
                gun = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
            sockets.append(gun)
            for number, shot in enumerate(shots, 1):
                gun.sendto(shot.packed(number), (shot.destination, 0))
                if not number % 64:
                    self._listen(sockets[:-1], seen, shots)
            last = Shot("10.60.0.2", "10.61.9.9", "udp", 9, 9).packed(_LAST)
            deadline = time.monotonic() + _PATIENCE
            gun.sendto(last, ("10.61.9.9", 0))
            while not self._listen(sockets[:-1], seen, shots):
                assert time.monotonic() < deadline, "a packet that no rule is about does not come through"
                time.sleep(0.002)
            # What stands in another socket's queue was put there before the last one came.
            self._listen(sockets[:-1], seen, shots)
        finally:
            os.sched_setaffinity(0, before)
            for each in sockets:
                each.close()
        return [each or "nothing" for each in seen]

    def _ears(self) -> Iterator["Ear"]:
        for namespace, where in ((self.receiver, "there"), (self.node, "here"), (self.sender, "refused")):
            with in_namespace(namespace):
                if where == "here":
                    made = [socket.socket(socket.AF_INET, socket.SOCK_RAW, number) for number in _PROTOCOLS.values()]
                else:
                    made = [socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0800))]
            for ear in made:
                ear.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE
                ear.setblocking(False)
                yield Ear(ear, where)

    def _listen(self, ears: Sequence["Ear"], seen: list[Any], shots: Sequence[Shot]) -> bool:
        done = False
        for ear in ears:
            for data in ear.heard():
                number = ear.number(data)
                done = done or number == _LAST
                if not 0 < number <= len(shots):
                    continue
                if ear.where == "refused":
                    seen[number - 1] = seen[number - 1] or "refused"
                else:
                    seen[number - 1] = _told(ear.where, data)
        return done


class Ear:
    """A socket, and what it means when it hears something."""

    def __init__(self, made: socket.socket, where: str) -> None:
        self.socket, self.where = made, where

    def close(self) -> None:
        self.socket.close()

    def heard(self) -> Iterator[bytes]:
        """All packets since the last time."""
        while True:
            try:
                data, peer = self.socket.recvfrom(2048)
            except BlockingIOError:
                return
            if self.socket.family != socket.AF_PACKET or peer[2] != socket.PACKET_OUTGOING:
                yield data

    def number(self, data: bytes) -> int:
        """Which shot a packet is, or answers; 0 for none of them."""
        if self.where != "refused":
            return int(struct.unpack_from(">H", data, 4)[0])
        head = (data[0] & 15) * 4
        if data[9] == 1 and data[head] == 3:
            return int(struct.unpack_from(">H", data, head + 8 + 4)[0])
        if data[9] == 6 and data[head + 13] & 4:
            return int(struct.unpack_from(">I", data, head + 8)[0] - 1)
        return 0


def _told(where: str, data: bytes) -> tuple[str, str, int, str]:
    head = (data[0] & 15) * 4
    port = 0 if data[9] == 1 else struct.unpack_from(">H", data, head + 2)[0]
    return where, socket.inet_ntoa(data[16:20]), port, socket.inet_ntoa(data[12:16])
