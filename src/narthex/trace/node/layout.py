"""The layout of a node bundle: its files, the programs that print them, and a script that takes the same.

A bundle is a tar, usually compressed with gzip; `TABLE_FILE` says how each part was taken or why it is missing.
docs/reference/bundle.md describes it.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Literal

import msgspec

from narthex.proxy.backends.sockets import PIN_DIRECTORY

FORMAT = 1
"""Version of the layout; additional parts don't change it."""
ROOT = "narthex-bundle"
"""The only directory in the tar."""
TABLE_FILE = "manifest.tsv"
"""Lines of status, path, command, and remark, separated by tabs; the first has `format`, FORMAT, node name, and writer.
"""

TAKEN, ABSENT, FAILED = "taken", "absent", "failed"
"""Statuses: the part is there; its program isn't installed; its program failed, with its message as remark."""


class BundlePart(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a bundle and the program that prints it."""

    path: str
    command: tuple[str, ...]
    unless: tuple[str, ...] = ()
    """Not taken if one of these parts was."""
    needs: str = ""
    """A file without which the kernel has nothing to report; running the program would load a kernel module."""
    root: bool = True


SETTINGS = (
    r"^net\.(bridge\..*|ipv4\.(ip_forward|ip_nonlocal_bind|ip_local_port_range|fib_multipath_hash_policy|vs\..*"
    r"|conf\.[^.]*\.(rp_filter|forwarding|route_localnet|accept_local|src_valid_mark|arp_ignore|arp_announce|proxy_arp))"
    r"|ipv6\.conf\.[^.]*\.(forwarding|disable_ipv6|accept_ra|proxy_ndp)"
    r"|netfilter\.nf_conntrack_(max|count|buckets|tcp_be_liberal|tcp_timeout_established|udp_timeout|udp_timeout_stream)"
    r"|nf_conntrack_max)$"
)
"""Settings that affect packets. Others are left out; some are secrets (`stable_secret`, `tcp_fastopen_key`)."""

_FLAVOURS = {
    4: ("rules/iptables-nft.txt", "rules/iptables-legacy.txt"),
    6: ("rules/ip6tables-nft.txt", "rules/ip6tables-legacy.txt"),
}

PARTS = (
    BundlePart(path="rules/iptables-nft.txt", command=("iptables-nft-save", "-c")),
    BundlePart(path="rules/iptables-legacy.txt", command=("iptables-legacy-save", "-c")),
    BundlePart(path="rules/ip6tables-nft.txt", command=("ip6tables-nft-save", "-c")),
    BundlePart(path="rules/ip6tables-legacy.txt", command=("ip6tables-legacy-save", "-c")),
    BundlePart(path="rules/iptables.txt", command=("iptables-save", "-c"), unless=_FLAVOURS[4]),
    BundlePart(path="rules/ip6tables.txt", command=("ip6tables-save", "-c"), unless=_FLAVOURS[6]),
    BundlePart(path="rules/nft.json", command=("nft", "-j", "list", "ruleset")),
    BundlePart(path="rules/nft.txt", command=("nft", "list", "ruleset")),
    BundlePart(path="rules/ipset.txt", command=("ipset", "save")),
    BundlePart(path="rules/ipvs.txt", command=("ipvsadm", "-S", "-n"), needs="/proc/net/ip_vs"),
    BundlePart(
        path="rules/ipvs-stats.txt", command=("ipvsadm", "-L", "-n", "--stats", "--exact"), needs="/proc/net/ip_vs"
    ),
    BundlePart(path="net/links.json", command=("ip", "-j", "-d", "link", "show"), root=False),
    BundlePart(path="net/addresses.json", command=("ip", "-j", "addr", "show"), root=False),
    BundlePart(path="net/routes-4.json", command=("ip", "-j", "-4", "route", "show", "table", "all"), root=False),
    BundlePart(path="net/routes-6.json", command=("ip", "-j", "-6", "route", "show", "table", "all"), root=False),
    BundlePart(path="net/policies-4.json", command=("ip", "-j", "-4", "rule", "show"), root=False),
    BundlePart(path="net/policies-6.json", command=("ip", "-j", "-6", "rule", "show"), root=False),
    BundlePart(path="net/neighbours.json", command=("ip", "-j", "neigh", "show"), root=False),
    BundlePart(path="net/fdb.json", command=("bridge", "-j", "fdb", "show"), root=False),
    BundlePart(path="net/listeners.txt", command=("ss", "-H", "-l", "-n", "-t", "-u"), root=False),
    BundlePart(path="net/conntrack-4.txt", command=("conntrack", "-L", "-f", "ipv4")),
    BundlePart(path="net/conntrack-6.txt", command=("conntrack", "-L", "-f", "ipv6")),
    BundlePart(path="net/sysctls.txt", command=("sysctl", "-a", "-r", SETTINGS), root=False),
    BundlePart(path="about/kernel.txt", command=("uname", "-srvm"), root=False),
    BundlePart(path="about/iptables.txt", command=("iptables", "--version"), root=False),
    BundlePart(path="about/nft.txt", command=("nft", "--version"), root=False),
    BundlePart(path="about/ip.txt", command=("ip", "-V"), root=False),
)
"""In the order in which they are taken."""

CNI_FILE = "about/cni.txt"
"""Names of the files in CNI_DIRECTORY and the types of their plugins, and nothing else from them."""
CNI_DIRECTORY = "/etc/cni/net.d"

SOCKETS_FILE = "net/sockets.json"
"""The maps of socket load balancing. Only `narthex bundle` can read them: the script says so where they are in use."""

OBJECTS = {
    "objects/services.json": "services",
    "objects/endpointslices.json": "endpointslices",
    "objects/nodes.json": "nodes",
    "objects/pods.json": "pods",
    "objects/networkpolicies.json": "networkpolicies",
}
"""Kubernetes lists, if a kubeconfig is given. Of pods: names, node, addresses, ports, conditions; never environment, volumes, or
annotations.
"""


class PartStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How taking one part went."""

    path: str
    status: str
    command: str = ""
    remark: str = ""
    bytes: int = 0


class BundleManifest(msgspec.Struct, frozen=True, kw_only=True):
    """A bundle's table of contents."""

    node: str
    writer: str
    parts: tuple[PartStatus, ...] = ()


class BundleDocument(BundleManifest, frozen=True, kw_only=True, tag_field="kind", tag="bundle"):
    """What `narthex bundle -o json` prints."""

    version: Literal[1] = 1


def table_text(table: BundleManifest) -> str:
    """Return the manifest as TABLE_FILE."""
    lines = [("format", str(FORMAT), table.node, table.writer)]
    lines += [(part.status, part.path, part.command, part.remark) for part in table.parts]
    return "".join("\t".join(" ".join(word.split()) for word in line) + "\n" for line in lines)


def read_table(text: str) -> BundleManifest:
    """Return the manifest of a bundle. Raises ValueError for a later format, or none."""
    rows = [line.split("\t") for line in text.splitlines() if line.strip()]
    if not rows or rows[0][0] != "format" or len(rows[0]) < 2:
        raise ValueError(f"{TABLE_FILE} does not begin with the bundle's format")
    if rows[0][1] != str(FORMAT):
        raise ValueError(f"the bundle has format {rows[0][1][:20]!r}; this version reads format {FORMAT}")
    first = (*rows[0], "", "")
    return BundleManifest(
        node=first[2],
        writer=first[3],
        parts=tuple(
            PartStatus(path=row[1], status=row[0], command=row[2], remark=row[3])
            for row in ((*row, "", "", "") for row in rows[1:])
        ),
    )


_HEAD = """#!/bin/sh
# Takes a bundle of this node for `narthex trace --bundle`, `narthex check --bundle` and `narthex diff`.
# It only reads, installs nothing and needs nothing but a shell, tar and gzip; as root it sees more.
#
#     sh bundle.sh > node.tgz          or from afar:   ssh root@node sh < bundle.sh > node.tgz
#
# What is in it, and what never is: docs/reference/bundle.md
set -u
umask 077
LC_ALL=C
export LC_ALL
PATH="$PATH:/usr/sbin:/sbin:/usr/local/sbin"
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM
top="$work/@ROOT@"
mkdir -p "$top/rules" "$top/net" "$top/about"
tab=$(printf '\\t')
row() {
    printf '%s\\t%s\\t%s\\t%s\\n' "$1" "$2" "$3" "$4" >> "$top/@TABLE@"
    case $1 in failed | absent) printf '%s: %s: %s\\n' "$1" "$2" "$4" >&2 ;; esac
}
row format @FORMAT@ "$(uname -n)" script
# take PATH PROGRAM ARGUMENT...
take() {
    path=$1
    shift
    if ! command -v "$1" > /dev/null 2>&1; then
        row absent "$path" "$*" "$1 is not installed"
        return
    fi
    if "$@" > "$top/$path" 2> "$work/said"; then
        row taken "$path" "$*" ""
    else
        rm -f "$top/$path"
        row failed "$path" "$*" "$(tr '\\n\\t' '  ' < "$work/said" | cut -c1-300)"
    fi
}
"""
_SETTINGS = """
# Settings: of /proc/sys/net those that decide about packets, in few processes. The dots of a name are slashes in its path.
(cd /proc/sys && find net -type f 2> /dev/null | tr './' '/.' | grep -E '@SETTINGS@' | tr './' '/.' |
    xargs grep '' /dev/null 2> /dev/null) |
    sed -e h -e 's/:.*//' -e 'y,./,/.,' -e G -e 's/\\n[^:]*:/ = /' | tr '\\t' ' ' | sort > "$top/net/sysctls.txt"
row taken net/sysctls.txt /proc/sys/net ""
"""
_CNI = """
# CNI: names of the configurations and types of the plugins, nothing else.
if [ -d @CNI@ ]; then
    for file in @CNI@/*; do
        [ -f "$file" ] || continue
        types=$(grep -o '"type"[[:space:]]*:[[:space:]]*"[A-Za-z0-9_.-]*"' "$file" | sed 's/.*"\\([^"]*\\)"$/\\1/' | tr '\\n' ' ')
        printf '%s\\t%s\\n' "$(basename "$file")" "$types"
    done > "$top/@CNIFILE@"
    row taken @CNIFILE@ "ls @CNI@" ""
else
    row absent @CNIFILE@ "ls @CNI@" "No such file or directory"
fi
"""
_SOCKETS = """
# Maps of socket load balancing: `narthex bundle` reads them; a shell can't.
if [ -d @PINS@ ] && [ -n "$(ls @PINS@)" ]; then
    row failed @SOCKETSFILE@ @PINS@ "this node balances sockets, and a script cannot read its maps: use narthex bundle"
else
    row absent @SOCKETSFILE@ @PINS@ "socket load balancing is not in use"
fi
"""
_TAIL = """
tar -C "$work" -cf - @ROOT@ | gzip -c
# Some terminals never say that the script is complete (kubectl debug -i): the shell would wait for more of it.
exit
"""


def script(without: Container[str] = ()) -> str:
    """Return a script for any POSIX shell that takes a bundle; `without` has the paths of parts to leave out."""
    lines = [_HEAD]
    for part in (each for each in PARTS if each.path not in without):
        if part.path == "net/sysctls.txt":
            lines.append(_SETTINGS.lstrip("\n"))
            continue
        words = " ".join(map(_quoted, part.command))
        conditions = [f'[ ! -e "$top/{other}" ]' for other in part.unless]
        conditions += [f"[ -e {part.needs} ]"] if part.needs else []
        take = f"take {part.path} {words}"
        if part.needs:
            absent = f'row absent {part.path} "{" ".join(part.command)}" "this kernel has none of it: there is no {part.needs}"'
            lines.append(f"if {' && '.join(conditions)}; then {take}; else {absent}; fi\n")
        else:
            lines.append(f"{' && '.join([*conditions, take])}\n")
    lines += [*([] if CNI_FILE in without else [_CNI]), _SOCKETS, _TAIL]
    text = "".join(lines)
    for name, value in (
        ("@ROOT@", ROOT),
        ("@TABLE@", TABLE_FILE),
        ("@FORMAT@", str(FORMAT)),
        ("@SETTINGS@", SETTINGS),
        ("@CNIFILE@", CNI_FILE),
        ("@CNI@", CNI_DIRECTORY),
        ("@SOCKETSFILE@", SOCKETS_FILE),
        ("@PINS@", PIN_DIRECTORY),
    ):
        text = text.replace(name, value)
    return text


def _quoted(word: str) -> str:
    return word if word.replace("-", "").replace("_", "").isalnum() else "'" + word.replace("'", "'\\''") + "'"
