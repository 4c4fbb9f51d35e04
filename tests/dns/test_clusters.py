"""Corefiles of clusters: which start, and that the page about them is current."""

import subprocess
import sys
from pathlib import Path

import pytest

from narthex.dns.corefile.parse import CorefileError, parse
from narthex.dns.program.worker_protocol import WorkerSetup
from narthex.dns.server.filters import QueryFilters
from narthex.linux.module_process import frame

ROOT = Path(__file__).parents[2]
FILES = Path(__file__).parent / "clusters"
NAMES = sorted(path.name for path in FILES.iterdir())
REFUSED = {
    "acme": "unknown plugin 'k8s_gateway'",
    "debugging": "plugin 'pprof'",
    "eks-multicluster": "multicluster",
    "etcd": "plugin 'etcd'",
    "gardener-views": "plugin 'view'",
    "gcp-add-on": "plugin 'federation'",
    "kubeadm-1.12": "plugin 'proxy'",
    "route53": "plugin 'route53'",
    "zone-file": "plugin 'file'",
}
"""Those that do not start, and the reason."""


def read(name):
    return parse((FILES / name).read_text(), name, load=lambda _: ())


@pytest.mark.parametrize("name", [name for name in NAMES if name not in REFUSED])
def test_a_corefile_of_a_cluster_starts(name):
    """Its settings also reach the workers, which make all plugins of them."""
    blocks = read(name).blocks
    assert frame(WorkerSetup(blocks=blocks, listeners=()))
    for block in blocks:
        QueryFilters(block)


@pytest.mark.parametrize(("name", "reason"), REFUSED.items())
def test_others_say_why_in_a_sentence(name, reason):
    with pytest.raises(CorefileError) as caught:
        read(name)
    errors = [each.message for each in caught.value.problems if each.severity == "error"]
    assert any(reason in message for message in errors)
    assert all(": " in message or message.startswith("unknown plugin") for message in errors)


def test_there_are_thirty_of_many_kinds():
    assert len(NAMES) >= 30
    kinds = [(FILES / name).read_text().splitlines()[0] for name in NAMES]
    assert all(kind.startswith("# ") for kind in kinds) and len(set(kinds)) == len(kinds)


def test_the_page_is_current():
    argv = [sys.executable, str(ROOT / "scripts" / "corefiles_page.py"), "-"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    page = (ROOT / "docs" / "reference" / "corefiles.md").read_text()
    assert page == done.stdout, "run `python scripts/corefiles_page.py`"
