"""A client in a cgroup and a network namespace of its own: the programs of a cgroup concern the sockets made in it."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from narthex.linux.cgroups import cgroup_mount, cgroup_of, create_cgroup, move_process, remove_cgroup
from narthex.linux.namespaces import in_namespace

_numbers = itertools.count()

_PROGRAM = r"""
import json, select, socket, sys, threading, time

def run(kind, address, port, source="", mapped=False, datagrams=1, held=False):
    family = socket.AF_INET6 if ":" in address or mapped else socket.AF_INET
    if mapped:
        address = "::ffff:" + address
    sock = socket.socket(family, socket.SOCK_STREAM if kind == "tcp" else socket.SOCK_DGRAM)
    sock.settimeout(20)
    if source:
        sock.bind((source, 0))
    said = {}
    if kind == "tcp":
        sock.connect((address, port))
        said["data"] = sock.recv(100).decode()
        said["peer"] = sock.getpeername()[:2]
    elif kind == "udp":
        sock.connect((address, port))
        said["peer"] = sock.getpeername()[:2]
        sock.send(b"?")
        data, sender = sock.recvfrom(100)
        said.update(data=data.decode(), sender=sender[:2])
    else:
        said["data"] = []
        for _ in range(datagrams):
            sock.sendto(b"?", (address, port))
            data, sender = sock.recvfrom(100)
            said["data"].append(data.decode())
            said["sender"] = sender[:2]
    if held:
        kept.append(sock)
    else:
        sock.close()
    return said

def burst(kind, address, port, count, seconds):
    # Many connections at once. Those that are not made in time are slow.
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    waiting = select.poll()
    socks = {}
    for _ in range(count):
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        sock.connect_ex((address, port))
        waiting.register(sock, select.POLLOUT)
        socks[sock.fileno()] = sock
    said = {"made": 0, "refused": 0}
    end = time.monotonic() + seconds
    while len(socks) and time.monotonic() < end:
        for number, _ in waiting.poll(max(0, end - time.monotonic()) * 1000):
            waiting.unregister(number)
            sock = socks.pop(number)
            said["refused" if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) else "made"] += 1
            sock.close()
    for sock in socks.values():
        sock.close()
    return {**said, "slow": len(socks)}

def hold(kind):
    # Whether connections that were made before still work.
    alive = 0
    for sock in kept:
        sock.send(b"!")
        alive += sock.recv(100) == b"!"
    return {"alive": alive}

def connect_without_pause(address, port, every):
    # Holds every so many connections open.
    number = 0
    while going:
        try:
            run("tcp", address, port, held=number % every == 0)
            traffic["held"] += number % every == 0
        except OSError as error:
            traffic["failed"].append(error.errno)
        number += 1
        traffic["made"] = number

def begin(kind, **order):
    traffic.update(made=0, held=0, failed=[])
    going.append(threading.Thread(target=connect_without_pause, kwargs=order))
    going[0].start()
    return {}

def end(kind):
    thread = going.pop()
    thread.join()
    return traffic

kept, going, traffic = [], [], {}
ORDERS = {"burst": burst, "alive": hold, "begin": begin, "made": lambda kind: traffic, "end": end}
for line in sys.stdin:
    order = json.loads(line)
    try:
        said = ORDERS.get(order["kind"], run)(**order)
    except OSError as error:
        said = {"errno": error.errno}
    print(json.dumps(said), flush=True)
"""


class CgroupClient:
    """Opens connections on request."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self.process = process
        self.orders, self.answers = process.stdin, process.stdout

    def ask(self, kind: str, *place: object, **more: object) -> dict[str, Any]:
        order = {"kind": kind, **dict(zip(("address", "port"), place, strict=False)), **more}
        self.orders.write(json.dumps(order) + "\n")
        self.orders.flush()
        answer: dict[str, Any] = json.loads(self.answers.readline())
        return answer


@contextmanager
def cgroup_client(cgroup: Path, namespace: str) -> Iterator[CgroupClient]:
    """Start a client in a cgroup and a network namespace."""
    with in_namespace(namespace):
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    client = CgroupClient(process)
    try:
        move_process(cgroup, process.pid)
        yield client
    finally:
        client.orders.close()
        client.answers.close()
        process.kill()
        process.wait()


@contextmanager
def own_cgroup() -> Iterator[Path]:
    """Make a cgroup below the hierarchy's root, which itself never gets a program."""
    mount = cgroup_mount()
    assert mount is not None, "no cgroup v2 hierarchy is mounted"
    path = mount / f"nx-test-{os.getpid()}-{next(_numbers)}"
    create_cgroup(path)
    try:
        yield path
    finally:
        remove_cgroup(path)


@contextmanager
def in_own_cgroup() -> Iterator[Path]:
    """Move this process into a cgroup of its own, to which the sockets belong that it makes."""
    mount, held = cgroup_mount(), cgroup_of()
    assert mount is not None and held is not None, "no cgroup v2 hierarchy is mounted"
    with own_cgroup() as path:
        move_process(path)
        try:
            yield path
        finally:
            move_process(mount / held.lstrip("/"))
