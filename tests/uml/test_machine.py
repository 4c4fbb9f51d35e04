"""The other kernel is what the tests in this folder take it for."""

import os
from pathlib import Path

from narthex.linux.run import run


def test_another_kernel_with_ip_vs():
    assert Path("/proc/net/ip_vs").read_text().startswith("IP Virtual Server")
    assert "User Mode Linux" in Path("/proc/cpuinfo").read_text()


def test_what_is_written_stays_inside():
    assert Path("/").stat().st_dev != Path(os.environ["NARTHEX_UML_REPORTS"]).stat().st_dev
    kinds = dict(line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines())
    assert (kinds["/"], kinds["/run"]) == ("overlay", "tmpfs")


def test_plain_iptables_is_the_legacy_one():
    assert "legacy" in run(["iptables", "--version"])
    assert "legacy" in run(["ip6tables", "--version"])


def test_no_other_session_is_visible():
    """Processes of the machine are its own."""
    assert Path("/proc/1/cmdline").read_bytes().split(b"\0")[2].endswith(b"guest.py")
