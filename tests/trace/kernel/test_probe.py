"""One packet of our own, followed by the kernel's tracing through the rules of our own modes and others': it goes as
predicted, and where the prediction is wrong, that is the place that is named."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
from tests.proxy.kernel.small_cluster import NODE_IPS, OUTSIDE, POD
from tests.trace.kernel.fault_stand import (
    NODE,
    SITES,
    ClientRoute,
    Stand,
    cluster_ip,
    from_node,
    snapshot,
    to_node_port,
    to_service,
)

import narthex
from narthex.linux.run import run
from narthex.model.net import Protocol
from narthex.trace.program import kernel_probe as probe
from narthex.trace.program.kernel_probe import ProbeComparison, probe_record, probe_text, send, sender_of
from narthex.trace.program.places import TraceError

pytestmark = pytest.mark.kernel


@pytest.fixture(scope="module", params=["nftables", "iptables"])
def stand(request: pytest.FixtureRequest) -> Iterator[Stand]:
    with Stand(request.param) as made:
        yield made


def tried(stand: Stand, way: ClientRoute) -> ProbeComparison:
    journey = stand.journey(way, snapshot(), stand.view())
    return send(journey, sender=stand.site(SITES.get(way.source)), node=stand.world.node, node_name=NODE)


WAYS = {
    "pod to cluster IP": (to_service("web"), "connected"),
    "pod to cluster IP, IPv6": (to_service("web", 6), "connected"),
    "pod to cluster IP with affinity": (to_service("sticky"), "connected"),
    "pod to itself": (to_service("self"), "connected"),
    "pod to nobody": (to_service("nobody"), "refused"),
    "outside to node port": (to_node_port("away"), "connected"),
    "outside to node port, IPv6": (to_node_port("away", 6), "connected"),
    "outside to source ranges": (ClientRoute(source=OUTSIDE[4], destination="203.0.113.11"), "nothing"),
    "node to cluster IP": (from_node("web"), "connected"),
    "node to cluster IP of the host's network": (from_node("host"), "connected"),
    "datagram": (ClientRoute(destination=cluster_ip("dns"), protocol=Protocol.UDP), "answered"),
    "ping": (ClientRoute(destination=NODE_IPS[0], port=0, protocol=Protocol.ICMP), "answered"),
    "ping, IPv6": (ClientRoute(source=POD[6], destination=NODE_IPS[2], port=0, protocol=Protocol.ICMP), "answered"),
}


@pytest.mark.parametrize("name", WAYS)
def test_the_kernel_goes_as_predicted(stand: Stand, name: str) -> None:
    way, answer = WAYS[name]
    done = tried(stand, way)
    assert done.alignment.agrees, probe_text(done)
    assert done.probed.answer == answer
    assert done.probed.trace is not None
    assert any(pair.kernel for pair in done.alignment.pairs)
    assert probe_record(done).agrees is True
    assert probe.TABLE not in run(["nft", "list", "tables"], namespace=stand.world.node)


def test_where_they_part_is_named(stand: Stand) -> None:
    """The rules change between the prediction and the packet."""
    way = to_service("web")
    journey = stand.journey(way, snapshot(), stand.view())
    with ExitStack() as undo:
        stand.run(f"iptables -t raw -I PREROUTING -d {way.destination} -m comment --comment late -j DROP")
        undo.callback(
            stand.run, f"iptables -t raw -D PREROUTING -d {way.destination} -m comment --comment late -j DROP"
        )
        done = send(journey, sender=stand.site(SITES[way.source]), node=stand.world.node, node_name=NODE)
    assert not done.alignment.agrees
    assert done.probed.answer == "nothing"
    assert "the kernel: ip raw PREROUTING" in done.alignment.parting
    assert "drop" in done.alignment.parting
    assert "PART" in probe_text(done)


def tables_in_turn(stand: Stand, undo: ExitStack, *verdicts: str) -> None:
    """Two tables, the older of which gets its chain last: in a dump, it looks older than it is."""
    for name in ("old", "new"):
        stand.run(f"nft add table ip {name}")
        undo.callback(stand.run, f"nft delete table ip {name}")
    for name, verdict in zip(("new", "old"), verdicts, strict=True):
        stand.run(f"nft add chain ip {name} c {{ type filter hook forward priority -5; }}")
        stand.run(f"nft add rule ip {name} c ct state new tcp dport 8080 {verdict}")


def test_chains_of_one_priority_run_in_the_order_of_their_registration(stand: Stand) -> None:
    with ExitStack() as undo:
        tables_in_turn(stand, undo, "accept", "accept")
        done = tried(stand, to_service("web"))
        assert done.alignment.agrees, probe_text(done)
        assert "in another order" in " ".join(done.alignment.notes)
        assert done.probed.answer == "connected"
    with ExitStack() as undo:
        tables_in_turn(stand, undo, "drop", "reject with tcp reset")
        journey = stand.journey(to_service("web"), snapshot(), stand.view())
        assert all("chain c of table new is assumed to run before chain c of table old" in end.supposing[0]
                   for end in (leaf.end for leaf in journey.leaves()))  # fmt: skip
        assert tried(stand, to_service("web")).probed.answer == "refused"


def test_a_packet_that_never_comes_is_said(stand: Stand) -> None:
    way = to_service("web")
    journey = stand.journey(way, snapshot(), stand.view())
    with ExitStack() as undo:
        stand.run("ip route del default", site=SITES[way.source])
        undo.callback(stand.run, "ip route add default via 100.127.1.1 dev eth0 onlink", site=SITES[way.source])
        done = send(journey, sender=stand.site(SITES[way.source]), node=stand.world.node, node_name=NODE, deadline=1.0)
    assert done.probed.trace is None
    assert "never saw the packet" in done.alignment.parting


def test_legacy_rules_are_left_out_and_that_is_said(stand: Stand) -> None:
    with ExitStack() as undo:
        stand.run("iptables-legacy -A FORWARD -j ACCEPT")
        undo.callback(stand.run, "iptables-legacy -D FORWARD -j ACCEPT")
        done = tried(stand, to_service("web"))
    assert done.alignment.agrees, probe_text(done)
    assert "iptables-legacy" in " ".join(done.alignment.notes)


@pytest.mark.parametrize("way", [
    ClientRoute(source="10.64.1.250", destination=cluster_ip("web")),
    msgspec.structs.replace(to_service("web"), protocol=Protocol.SCTP),
], ids=["nobody's address", "sctp"])  # fmt: skip
def test_what_cannot_be_sent_is_said_and_nothing_is_left(stand: Stand, way: ClientRoute) -> None:
    journey = stand.journey(way, snapshot(), stand.view())
    with pytest.raises(TraceError, match="the probe: "):
        send(journey, sender=stand.site(SITES[POD[4]]), node=stand.world.node, node_name=NODE)
    assert probe.TABLE not in run(["nft", "list", "tables"], namespace=stand.world.node)


def test_the_sender_is_found_by_its_address(stand: Stand) -> None:
    assert sender_of(NODE_IPS[0], stand.world.node) == stand.world.node
    assert sender_of("127.0.0.1", stand.world.node) == stand.world.node
    with pytest.raises(TraceError, match="no network namespace of this machine has 192\\.0\\.2\\.77"):
        sender_of("192.0.2.77", stand.world.node)


def test_only_one_probe_at_a_time_and_a_killed_one_leaves_nothing(stand: Stand) -> None:
    """The kernel takes the table away with the process, however it ends."""
    script = (
        "import sys, time; from narthex.linux.namespaces import in_namespace; "
        "from narthex.linux.libnftables import OwnedTables\n"
        f"with in_namespace({stand.world.node!r}): held = OwnedTables('table ip {probe.TABLE} {{ flags owner; }}')\n"
        "print('there', flush=True); time.sleep(600)"
    )
    source = str(Path(narthex.__file__).parents[1])
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": source}
    ) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == b"there\n"
            with pytest.raises(TraceError, match="only one probe at a time"):
                tried(stand, to_service("web"))
        finally:
            other.send_signal(signal.SIGKILL)
    assert tried(stand, to_service("web")).alignment.agrees


def test_the_command_tells_it_and_its_exit_status(stand: Stand) -> None:
    words = [
        sys.executable, "-m", "narthex", "trace", NODE_IPS[0], f"{cluster_ip('web')}:80", "--live", "--netns",
        stand.world.node, "--probe",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(Path(narthex.__file__).parents[1])}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("prediction and kernel agree\n")
    done = subprocess.run(
        [*words, "-o", "json"], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    told = json.loads(done.stdout)["probe"]
    assert (told["answer"], told["agrees"], told["parting"]) == ("connected", True, "")
