"""Kubernetes' end-to-end suite against a cluster of real kubelets, with images that are made here."""

import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from tests.cluster.cluster import Cluster
from tests.cluster.families import DUAL_STACK
from tests.cluster.files import PAUSE_IMAGE
from tests.cluster.images import ImageBuilder, write_suite_context

from narthex.lab import topology
from narthex.lab.conformance import DEFAULT_FOCUS, CaseOutput, junit
from narthex.lab.program.conformance.image import REGISTRIES
from narthex.lab.program.conformance.run import ConformanceProgress, _Run
from narthex.lab.program.conformance.suite import Suite

_NAME = "narthex.example/suite:1"
_PROCESSES = 3
SKIP = r"\[Feature:|\[Serial\]|\[Slow\]|\[Disruptive\]|SCTP|NetworkPolicy"
"""Tests that need more than a cluster of this kind, or would disturb others."""
_DUAL_STACK = r"\[Feature:IPv6DualStack\]"
_SKIP_DUAL_STACK = r"\[Serial\]|\[Slow\]|\[Disruptive\]|SCTP|NetworkPolicy"


class ChosenSuite(NamedTuple):
    """Which tests to run, by regular expressions, and where to report."""

    focus: str = ""
    """Empty: [sig-network] Conformance, and in dual stack the tests for that."""
    skip: str = ""
    """Empty: with a focus, SKIP."""
    junit: Path | None = None
    image: Path | None = None
    """An archive of Narthex's image; None: it has been built."""


def run_conformance(cluster: Cluster, builder: ImageBuilder, suite: ChosenSuite) -> Iterator[CaseOutput]:
    """Run the suite; yield the results as they come. Raises LabError."""
    programs = cluster.programs
    assert programs.e2e is not None and programs.agnhost is not None
    directory = cluster.disk / "suite"
    directory.mkdir()
    if suite.image is not None:
        builder.load(suite.image)
    _load_images(cluster, builder)
    focus, skip = suite.focus or DEFAULT_FOCUS, suite.skip or (SKIP if suite.focus else "")
    if not suite.focus and cluster.families.name == DUAL_STACK:
        focus, skip = f"{DEFAULT_FOCUS}|{_DUAL_STACK}", _SKIP_DUAL_STACK
    processes = Suite(programs.e2e, directory, focus, skip)
    options: Any = SimpleNamespace(processes=_PROCESSES, lab=SimpleNamespace(nodes=len(cluster.nodes)))
    lab: Any = SimpleNamespace(name=cluster.name, outside=topology.outside_namespace(cluster.name))
    reached = _Run(processes, processes.choose(), options, lab)
    begun = time.monotonic()
    done: queue.SimpleQueue[ConformanceProgress | None] = queue.SimpleQueue()

    def work() -> None:
        try:
            reached.finish(threading.Event(), done.put)
        finally:
            done.put(None)

    try:
        thread = threading.Thread(target=work)
        thread.start()
        while (progress := done.get()) is not None:
            if progress.last is not None:
                yield progress.last
    finally:
        reached.close()
        if suite.junit is not None:
            suite.junit.write_text(junit(reached.results, "sig-network", time.monotonic() - begun))


def _load_images(cluster: Cluster, builder: ImageBuilder) -> None:
    """Give the nodes the images that tests start, by the names that the suite has for them."""
    programs = cluster.programs
    assert programs.e2e is not None and programs.agnhost is not None
    context = cluster.disk / "suite-image"
    archive = builder.build(_NAME, write_suite_context(programs.agnhost, context), context)
    registries = context / "registries.yaml"
    registries.write_text(json.dumps(REGISTRIES))
    environment = {**os.environ, "KUBE_TEST_REPO_LIST": str(registries)}
    listed = subprocess.run(
        [str(programs.e2e), "--list-images"], env=environment, capture_output=True, text=True, check=True
    )
    kinds = tuple(
        f"{REGISTRIES['promoterE2eRegistry']}/{kind}:" for kind in ("agnhost", "busybox", "glibc-dns-testing")
    )
    names = listed.stdout.split()
    tags = {name: _NAME for name in names if name.startswith(kinds)}
    # A test looks at the node's connections in it.
    tags |= {name: _NAME for name in names if "/distroless-iptables:" in name}
    tags |= {name: PAUSE_IMAGE for name in names if name.startswith(f"{REGISTRIES['gcRegistry']}/pause:")}
    cluster.load_image(archive)
    for node in cluster.nodes:
        for name, image in sorted(tags.items()):
            cluster.inside(node, "ctr", "-n", "k8s.io", "images", "tag", image, name)
