"""Two controllers as processes, and a server with faults: by the server's own log, never do both write."""

import json
import random
import signal
import subprocess
import sys
import time

import pytest

from narthex.testing.apiserver import DropConnection, FaultyApiServer, Refuse
from narthex.testing.build import node, service

LIMIT = 60.0
KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: it
clusters: [{{name: it, cluster: {{server: {url}}}}}]
users: [{{name: it, user: {{token: {token}}}}}]
contexts: [{{name: it, context: {{cluster: it, user: it}}}}]
"""


class Place:
    """The server, and controllers that are told apart by their tokens."""

    def __init__(self, server, folder):
        self.server = server
        self.folder = folder
        self.processes = {}

    def start(self, name):
        file = self.folder / name
        file.write_text(KUBECONFIG.format(url=self.server.url, token=name))
        options = ["--kubeconfig", str(file), "--lease-seconds=3", "--healthz-port=0", "--metrics-port=0"]
        command = [sys.executable, "-m", "narthex", "lb", "controller", "--address=127.0.0.1", *options]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(command, stderr=log)

    def end(self):
        for process in self.processes.values():
            process.kill()
            process.wait()

    def make(self, *numbers):
        for number in numbers:
            self.server.put(service(f"shop/s{number}", f"10.110.1.{number}", type="LoadBalancer"))

    def held(self, number):
        raw = self.server.do(lambda data: data.get("Service", ("shop", f"s{number}"))).raw
        return [each["ip"] for each in raw.get("status", {}).get("loadBalancer", {}).get("ingress", ())]

    def wait(self, what):
        end = time.monotonic() + LIMIT
        while not what():
            logs = {name: (self.folder / f"{name}.log").read_text()[-600:] for name in self.processes}
            assert time.monotonic() < end, logs
            time.sleep(0.05)

    def wait_for(self, *numbers):
        self.wait(lambda: all(self.held(number) for number in numbers))

    def leader(self):
        """Who had the Lease by the last write of it; empty when it was released."""
        return self.history()[-1][0] if self.history() else ""

    def history(self):
        """By whom the Lease was held, and who wrote Services under it."""
        found = []
        for seen, code in list(self.server.writes):
            if code not in (200, 201):
                continue
            who = seen.headers["authorization"].removeprefix("Bearer ")
            if "/leases" in seen.path:
                holder = json.loads(seen.body)["spec"]["holderIdentity"]
                found.append((who if holder else "", []))
            elif "/services/" in seen.path:
                found[-1][1].append(who)
        return found


@pytest.fixture
def place(tmp_path):
    with FaultyApiServer() as server:
        server.put(node())
        meta = {"name": "lan", "namespace": "metallb-system"}
        server.put_raw("IPAddressPool", {"metadata": meta, "spec": {"addresses": ["192.168.15.0/24"]}})
        place = Place(server, tmp_path)
        try:
            yield place
        finally:
            place.end()


def test_one_takes_over_from_the_other(place):
    chance = random.Random(1)

    def faults(seen):
        # Leases and Services alike: refused, or done and not told.
        if seen.method == "PATCH" and chance.random() < 0.15:
            return chance.choice([Refuse(500), DropConnection(), Refuse(409)])
        return None

    place.server.faults = faults
    place.start("one")
    place.start("two")
    place.make(1, 2, 3)
    place.wait_for(1, 2, 3)

    first = place.leader()
    place.processes[first].kill()
    place.processes[first].wait()
    place.make(4, 5)
    place.wait_for(4, 5)
    second = place.leader()
    assert second != first

    place.start(first)
    place.processes[second].send_signal(signal.SIGTERM)
    assert place.processes[second].wait(LIMIT) == 0
    place.make(6)
    place.wait_for(6)

    given = [address for number in range(1, 7) for address in place.held(number)]
    assert len(set(given)) == 6
    # Each write is by the one that held the Lease when the server took it.
    for holder, writers in place.history():
        assert set(writers) <= {holder}
    assert {writer for _, writers in place.history() for writer in writers} == {"one", "two"}
