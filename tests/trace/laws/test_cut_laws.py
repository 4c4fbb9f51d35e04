"""A law: remove lines, chains, or tables from a complete dump, and the answer may become unknown, but never silently wrong."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from narthex.model.store import Snapshot
from narthex.trace.model import Fate, PacketPath
from narthex.trace.node.view import view_of_files
from narthex.trace.program.travel import KnownCluster, TraceRequest, travel

DUMPS = Path(__file__).parents[2] / "dumps"
CUTS = 25
"""Cuts of each dump and kind. Their seeds are fixed, and a failure names its own."""
OWN = ("192.168.1.11",)
FLOWS = {
    "cut-law.iptables-save": (
        "10.96.0.20:80",
        "10.96.0.30:80",
        "10.96.0.40:80",
        "192.168.1.11:30080",
        "192.168.15.7:80",
    ),
    "kube-proxy.nft-list-a": (
        "10.96.0.50:80",
        "10.96.0.77:80",
        "192.168.1.11:30080",
        "192.168.15.7:80",
        "10.96.0.60:80",
    ),
}


def asked(text: str, to: str) -> PacketPath:
    known = KnownCluster(views=(view_of_files([("rules.txt", text)]),), snapshot=Snapshot(), node_ips=OWN)
    return travel(known, TraceRequest(source="198.51.100.7", destination=to, iif="eth0"))


def ends(path: PacketPath) -> dict[tuple[Fate, str, int, bool], float]:
    return {key: round(float(share), 3) for key, share in path.ends().items() if share}


ALONE = re.compile(
    r"-A (?:KUBE-SERVICES|KUBE-EXTERNAL-SERVICES|KUBE-PROXY-FIREWALL|KUBE-FW-\S+) .*-[sd] |-A KUBE-NODEPORTS |-A KUBE-SVC-\S+ ! -s|saddr !=|mark-for-masq"
)
"""Rules that nothing else in a dump mentions, so that no text shows that one of them is missing."""


def lines(text: str, rng: random.Random) -> str:
    """Remove one to three rules."""
    every = text.splitlines(keepends=True)
    rules = [
        n
        for n, line in enumerate(every)
        if re.match(r"-A|\t\t(?!type|comment|elements|size|flags|timeout|\s)", line) and not ALONE.search(line)
    ]
    gone = set(rng.sample(rules, rng.randint(1, 3)))
    return "".join(line for n, line in enumerate(every) if n not in gone)


def tail(text: str, rng: random.Random) -> str:
    """Cut the end off."""
    every = text.splitlines(keepends=True)
    return "".join(every[: rng.randint(len(every) // 5, len(every) - 2)])


def chain(text: str, rng: random.Random) -> str:
    """Remove a chain with all its rules."""
    names = re.findall(r"^(?::|\tchain )(\S+) ", text, re.MULTILINE)
    name = re.escape(rng.choice(names))
    text = re.sub(rf"^(?::|-A ){name} .*\n", "", text, flags=re.MULTILINE)
    return re.sub(rf"^\tchain {name} {{\n.*?^\t}}\n", "", text, flags=re.MULTILINE | re.DOTALL)


def filtered(text: str, rng: random.Random) -> str:
    """Keep the lines with a word, as `grep` does."""
    word = rng.choice(["KUBE-SERVICES", "10.96.0", "shop/web", "KUBE-SEP", "dport", "vmap", "goto"])
    return "".join(line for line in text.splitlines(keepends=True) if word in line)


@pytest.mark.parametrize("name", FLOWS)
@pytest.mark.parametrize("cut", [lines, tail, chain, filtered], ids=lambda cut: cut.__name__)
def test_a_cut_dump_is_never_silently_wrong(name: str, cut: object) -> None:
    text = (DUMPS / name).read_text()
    right = {to: ends(asked(text, to)) for to in FLOWS[name]}
    for seed in range(CUTS):
        part = cut(text, random.Random(seed))  # type: ignore[operator]
        try:
            answers = {to: asked(part, to) for to in FLOWS[name]}
        except ValueError:
            # Nothing that is known is left.
            continue
        for to, path in answers.items():
            found = ends(path)
            unknown = any(fate is Fate.UNKNOWN for fate, *_ in found)
            supposing = any(leaf.end.supposing for leaf in path.leaves())
            kept = {key: share for key, share in found.items() if key[0] is not Fate.UNKNOWN}
            assert found == right[to] or supposing or (unknown and kept.keys() <= right[to].keys()), (
                seed,
                to,
                found,
                right[to],
            )
