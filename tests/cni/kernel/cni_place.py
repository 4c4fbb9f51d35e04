"""A node for CNI plugins, with somebody outside: namespaces, installed programs, calls as a container runtime makes them."""

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.cni.any_case import CASES, changed

from narthex.cni.program.install import install
from narthex.linux.links import ip_batch
from narthex.linux.namespaces import create_namespace, delete_namespace, in_namespace, namespace_names
from narthex.linux.run import run

_numbers = itertools.count()
_cases: Iterator[Callable[[str], str]] = itertools.cycle((str, *CASES))
OUTSIDE4, OUTSIDE6 = "192.0.2.2", "2001:db8::2"
NODE4, NODE6 = "192.0.2.1", "2001:db8::1"
PATIENCE = 30.0


class Place:
    """Use as a context. `programs` may be the reference's."""

    def __init__(self, scratch: Path, agent: bool = False) -> None:
        self.name = f"ncp{os.getpid()}x{next(_numbers)}"
        self.scratch = scratch
        self.networks = scratch / "networks"
        self.state = scratch / "state"
        self.socket = scratch / "cni.sock"
        self.programs = scratch / "bin"
        self._wants_agent = agent
        self.agent: Any = None
        self._servers: list[tuple[socket.socket, threading.Thread]] = []

    @property
    def outside(self) -> str:
        return f"{self.name}o"

    def __enter__(self) -> "Place":
        install(self.programs, None, socket=str(self.socket), state=str(self.state))
        try:
            create_namespace(self.name)
            create_namespace(self.outside)
            ip_batch(self.name, [f"link add uplink type veth peer name uplink netns {self.outside}"])
            for name, (ipv4, ipv6) in ((self.name, (NODE4, NODE6)), (self.outside, (OUTSIDE4, OUTSIDE6))):
                addresses = [
                    f"addr add {ipv4}/24 dev uplink",
                    f"addr add {ipv6}/64 dev uplink nodad",
                    "link set uplink up",
                ]
                ip_batch(name, addresses)
            if self._wants_agent:
                self.start_agent()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_agent()
        for server, thread in self._servers:
            # A thread that is about to accept would take connections of the next socket with the same number.
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            thread.join(PATIENCE)
            server.close()
        for name in namespace_names():
            if name.startswith(self.name):
                delete_namespace(name)

    def start_agent(self) -> None:
        options = ["--socket", str(self.socket), "--state-dir", str(self.state)]
        with in_namespace(self.name):
            self.agent = subprocess.Popen(
                [sys.executable, "-m", "narthex", "cni", "agent", *options],
                stdout=subprocess.PIPE,
                text=True,
                cwd=Path(__file__).parents[3] / "src",
            )
        assert self.agent.stdout.readline().startswith("listening"), "the agent does not start"

    def stop_agent(self) -> None:
        if self.agent is not None:
            self.agent.kill()
            self.agent.wait()
            self.agent.stdout.close()
            self.agent = None

    def pod(self, name: str) -> str:
        """Make a pod's namespace; its path."""
        create_namespace(f"{self.name}{name}")
        return f"/run/netns/{self.name}{name}"

    def drop_pod(self, name: str) -> None:
        """Remove a pod's namespace, and wait until the kernel has done so: it takes its time."""
        links = self.links()
        there = "eth0" in run(["ip", "-br", "link"], namespace=f"{self.name}{name}")
        delete_namespace(f"{self.name}{name}")
        end = time.monotonic() + 30
        while there and self.links() == links and time.monotonic() < end:
            time.sleep(0.02)

    def bridge(self, **more: Any) -> dict[str, Any]:
        """A configuration of `bridge`, dual-stack."""
        ipam = {
            "type": "host-local",
            "dataDir": str(self.networks),
            "ranges": [[{"subnet": "10.77.0.0/24"}], [{"subnet": "fd77::/64"}]],
            "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}],
        }
        common = {"cniVersion": "1.1.0", "name": "net", "type": "bridge", "bridge": "cni0", "isGateway": True}
        return {**common, "ipMasq": True, "hairpinMode": True, "ipam": ipam, **more}

    def portmap(self, before: Any, *ports: Any, **more: Any) -> dict[str, Any]:
        """A configuration of `portmap` behind a result; ports are (host, container, protocol, hostIP)."""
        names = ("hostPort", "containerPort", "protocol", "hostIP")
        mappings = [dict(zip(names, port, strict=False)) for port in ports]
        common = {"cniVersion": "1.1.0", "name": "net", "type": "portmap", "runtimeConfig": {"portMappings": mappings}}
        return {**common, "prevResult": before, **more}

    def call(
        self,
        command: str,
        config: Any,
        pod: str | None,
        container: str | None = None,
        *,
        plugin: str | None = None,
        programs: Any = None,
        environment: dict[str, str] | None = None,
    ) -> tuple[int, Any]:
        """Run a plugin: exit status and what it printed, decoded. `config` may be bytes.

        Each call of our own plugins has the keys in another case, and must do the same.
        """
        plugin = plugin or config["type"]
        everything = {
            "CNI_COMMAND": command,
            "CNI_CONTAINERID": container or pod,
            "CNI_NETNS": f"/run/netns/{self.name}{pod}",
            "CNI_IFNAME": "eth0",
            "CNI_PATH": str(programs or self.programs),
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            **(environment or {}),
        }
        given = {name: value for name, value in everything.items() if value is not None}
        if not isinstance(config, bytes):
            config = json.dumps(config if programs else changed(config, next(_cases))).encode()
        with in_namespace(self.name):
            done = subprocess.run(
                [(programs or self.programs) / plugin], input=config, env=given, capture_output=True, timeout=60
            )
        assert not done.stderr or programs, done.stderr.decode()
        said = json.loads(done.stdout) if done.stdout.strip() else None
        return done.returncode, said

    def good(self, *arguments: Any, **named: Any) -> Any:
        """A call that succeeds: what it printed."""
        status, said = self.call(*arguments, **named)
        assert status == 0, said
        return said

    def bad(self, *arguments: Any, **named: Any) -> Any:
        """A call that fails: the error."""
        status, said = self.call(*arguments, **named)
        assert status == 1 and {"code", "msg", "cniVersion"} <= said.keys(), said
        return said

    def add(self, name: str, *ports: Any, config: Any = None) -> Any:
        """Make a pod with its interface and host ports: the result."""
        self.pod(name)
        result = self.good("ADD", config or self.bridge(), name)
        return self.good("ADD", self.portmap(result, *ports), name) if ports else result

    def links(self) -> list[str]:
        """Names of the node's interfaces without those of the beginning."""
        shown = json.loads(run(["ip", "-j", "link"], namespace=self.name))
        return sorted(link["ifname"] for link in shown if link["ifname"] not in ("lo", "uplink"))

    def reserved(self) -> list[str]:
        """Addresses that are reserved, by network."""
        return sorted(
            path.name for path in self.networks.glob("*/*") if path.name != "lock" and not path.name.startswith("last")
        )

    def records(self) -> list[str]:
        """Attachments that the node has records of."""
        return sorted(f"{path.parent.name}/{path.name}" for path in self.state.glob("*/*"))

    def owners(self) -> list[str]:
        """Whose elements there are in our tables."""
        text = run(["nft", "list", "ruleset"], namespace=self.name)
        return sorted({word.partition('"')[0] for word in text.split('comment "')[1:]})

    def gc(self, *options: str) -> Any:
        """Run `narthex cni gc`: what it printed."""
        argv = [sys.executable, "-m", "narthex", "cni", "gc", "-o", "json", *options]
        argv += ["--state-dir", str(self.state), "--data-dir", str(self.networks)]
        with in_namespace(self.name):
            done = subprocess.run(
                argv, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[3] / "src"
            )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def nothing_left(self) -> None:
        """Nothing of any pod is left."""
        assert [name for name in self.links() if name.startswith("veth")] == []
        assert self.reserved() == []
        assert self.records() == []
        assert self.owners() == []

    def serve(self, where: str, port: int, kind: int = socket.SOCK_STREAM, address: str = "::") -> None:
        """Tell everybody who asks at a port where they come from."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with in_namespace(f"{self.name}{where}"):
            server = socket.socket(family, kind)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((address, port))
        if kind == socket.SOCK_STREAM:
            server.listen()
        thread = threading.Thread(target=_answer, args=(server, where, kind), daemon=True)
        self._servers.append((server, thread))
        thread.start()

    def ask(
        self,
        where: str,
        address: str,
        port: int,
        kind: int = socket.SOCK_STREAM,
        patience: float = PATIENCE,
        source: Any = None,
    ) -> str | None:
        """Who answers, and as whom we are seen: `name address`; None when nobody does."""
        with in_namespace(where if where == self.outside else f"{self.name}{where}"):
            sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, kind)
        with sock:
            sock.settimeout(patience)
            try:
                if source is not None:
                    sock.bind(source)
                sock.connect((address, port))
                sock.send(b"?")
                return sock.recv(200).decode()
            except OSError:
                return None


def _answer(server: socket.socket, where: str, kind: int) -> None:
    with contextlib.suppress(OSError):
        while True:
            if kind == socket.SOCK_STREAM:
                connection, peer = server.accept()
                with connection:
                    connection.recv(1)
                    connection.send(f"{where} {peer[0].removeprefix('::ffff:')}".encode())
            else:
                _, peer = server.recvfrom(10)
                if peer is None:
                    return
                server.sendto(f"{where} {peer[0].removeprefix('::ffff:')}".encode(), peer)
