"""The public API: load a cluster, plan it, render its rules, and explain paths; `import narthex` offers these names.

Nothing here needs root or changes the machine. Everything raises `narthex.InputError` (a ValueError) for input that cannot be
used, with a message that says what is wrong.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Literal

import msgspec

from narthex.cli.output import json_text
from narthex.cli.trace import picture
from narthex.model import InputError, IPFamily
from narthex.netfilter.dump.read import read_dumps
from narthex.proxy.backends import BACKENDS
from narthex.proxy.plan.ir import Plan
from narthex.trace.causes.catalogue import CauseFinding
from narthex.trace.document import trace_document
from narthex.trace.model import PacketPath
from narthex.trace.program.inputs import NodeInputs, NodeOptions, node_inputs, read_cluster
from narthex.trace.program.reports import compare_node
from narthex.trace.program.rules_trace import trace_by_objects
from narthex.trace.program.travel import from_files
from narthex.trace.render.html import frame
from narthex.trace.render.text import text
from narthex.trace.reports.check import CheckReport

__all__ = ["Explanation", "InputError", "check", "load", "plan", "render", "trace"]

Dump = str | os.PathLike[str]
"""A file with the output of `iptables-save`, `nft list ruleset`, `ipset save`, `ipvsadm`, or several of them."""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """The path of a packet, and the causes of its failure."""

    path: PacketPath
    causes: tuple[CauseFinding, ...]
    """The first cause first; empty if the path is healthy."""

    def __str__(self) -> str:
        """Return the path and the causes as `narthex trace` prints them."""
        return text(self.path, self.causes)

    def json(self) -> str:
        """Return the document of `narthex trace -o json`."""
        return json_text(trace_document(self.path, self.causes))

    def picture(self, format: Literal["svg", "html", "dot", "mermaid"] = "svg") -> str:
        """Return the path as a drawing, a self-contained page, or a graph for another tool."""
        return picture(format)(self.path, self.causes)

    def _repr_svg_(self) -> str:
        """Return the picture that a notebook shows, with the first cause."""
        return self.picture("svg")

    def _repr_html_(self) -> str:
        """Return the page that a notebook shows, as an element."""
        return frame(self.path, self.causes)


def load(
    manifests: str | os.PathLike[str],
    *,
    node: str = "",
    mode: str = "",
    cluster_cidr: str = "",
    config: str | os.PathLike[str] | None = None,
    node_ips: tuple[str, ...] = (),
) -> NodeInputs:
    """Read a cluster from manifests, as one of its nodes sees it.

    Args:
        manifests: A YAML or JSON file, or a directory of such files, as `kubectl get -o yaml` prints them.
        node: The name of the node; required if the manifests contain several Nodes.
        mode: The proxy mode; by default that of `config`, or nftables.
        cluster_cidr: The pod CIDR of each family, separated by a comma.
        config: A KubeProxyConfiguration file.
        node_ips: The addresses of the node, if its Node object does not list them.
    """
    options = NodeOptions(
        node=node, mode=mode, config_file=Path(config) if config else None, cluster_cidr=cluster_cidr, node_ips=node_ips
    )
    return node_inputs(read_cluster(Path(manifests)), options)


def plan(cluster: NodeInputs) -> dict[IPFamily, Plan]:
    """Return what must happen to every packet that concerns a Service, for each IP family in use."""
    return {family: cluster.plan(family) for family in cluster.families}


def render(cluster: NodeInputs) -> dict[IPFamily, str]:
    """Return the rules of the cluster's mode as their kernel tool reads them, for each IP family in use."""
    backend = BACKENDS[cluster.mode]
    return {family: backend.text(backend.render(each)) for family, each in plan(cluster).items()}


def trace(cluster: NodeInputs, source: str, destination: str, *, rules: tuple[Dump, ...] = ()) -> Explanation:
    """Explain the path of a packet.

    Args:
        cluster: The objects, and the node whose rules the packet meets.
        source: `outside`, an address, or the name of a pod, node, or workload.
        destination: A Service, pod, node, or address, as `NAME[:PORT][/PROTOCOL]`.
        rules: The node's actual rules; by default, the rules that Narthex renders.
    """
    texts = [(str(path), Path(path).read_text(errors="replace")) for path in rules]
    traced = trace_by_objects(
        cluster.snapshot,
        source,
        destination,
        lambda _: cluster,
        dump=(lambda family: read_dumps(texts, family).for_family(family)) if texts else None,
    )
    return Explanation(path=traced.path, causes=tuple(traced.findings))


def check(cluster: NodeInputs, rules: tuple[Dump, ...]) -> tuple[CheckReport, ...]:
    """Compare what the objects require with the rules of a node, for each IP family."""
    return compare_node(cluster, from_files([Path(path) for path in rules], cluster.config.node_name))


# Importing the package `narthex.trace` set this attribute to the package.
setattr(sys.modules["narthex"], "trace", trace)  # noqa: B010
