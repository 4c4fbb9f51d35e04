"""The addresses of node-local DNS, on the kernel."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from narthex.dns.node_local import LINK, TABLE
from narthex.host import netns
from narthex.host.addresses import own_addresses
from narthex.host.dns.own_link import OwnLink, OwnLinkError
from narthex.host.run import run
from narthex.testing.load import until

pytestmark = pytest.mark.kernel

SOURCE = Path(__file__).parents[2] / "src"
ADDRESSES = ["169.254.20.10", "10.96.0.10", "fd6e::a"]
HOLDER = f"""
import sys, time
from narthex.host.dns.own_link import OwnLink
held = OwnLink({ADDRESSES!r})
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def node():
    name = f"nxt-{os.getpid()}-ownlink"
    netns.create(name)
    run(["ip", "link", "set", "lo", "up"], namespace=name)
    yield name
    netns.delete(name)


def there(node):
    """What is left of it."""
    links = run(["ip", "-br", "address"], namespace=node)
    return LINK in links, TABLE in run(["nft", "list", "tables"], namespace=node)


def test_it_goes_with_its_process(node):
    with netns.entered(node):
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(SOURCE)}
        )
    try:
        assert holder.stdout.readline() == b"ready\n"
        assert there(node) == (True, True)
        for address in ADDRESSES:
            assert run(["ip", "route", "get", address], namespace=node).startswith("local ")
        refused = run(["sh", "-c", f"nft delete table ip {TABLE} 2>&1 || true"], namespace=node)
        assert "not permitted" in refused
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    until(lambda: there(node) == (False, False), "the end of link and tables")


def test_one_at_a_time_and_again(node):
    with netns.entered(node):
        held = OwnLink(ADDRESSES)
        try:
            own = {each.address for each in own_addresses()}
            assert not own & set(ADDRESSES)
            with pytest.raises(OwnLinkError, match="another process answers on this node"):
                OwnLink(ADDRESSES)
        finally:
            held.close()
            held.close()
        OwnLink(ADDRESSES[:1]).close()
    assert there(node) == (False, False)


def test_what_cannot_be_leaves_nothing(node):
    with netns.entered(node), pytest.raises(OwnLinkError):
        # Nobody may have all of them: the kernel refuses the second one.
        OwnLink(["127.0.0.1", "ff02::1"])
    assert there(node) == (False, False)
