"""Content of a pod's /etc/hosts and /etc/resolv.conf.

Follows Kubernetes 1.34: kubelet_pods.go (managedHostsFileContent), network/dns/dns.go.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from narthex.lab.cluster import DOMAIN, resolv_conf
from narthex.lab.kubelet.environment import hostname

_HEAD = """\
# Kubernetes-managed hosts file.
127.0.0.1\tlocalhost
::1\tlocalhost ip6-localhost ip6-loopback
fe00::0\tip6-localnet
fe00::0\tip6-mcastprefix
fe00::1\tip6-allnodes
fe00::2\tip6-allrouters
"""


def hosts(pod: Mapping[str, Any], addresses: Iterable[str]) -> str:
    """Return /etc/hosts."""
    spec, name = pod["spec"], hostname(pod)
    if spec.get("subdomain"):
        name = f"{name}.{spec['subdomain']}.{pod['metadata'].get('namespace', '')}.svc.{DOMAIN}\t{name}"
    lines = [f"{address}\t{name}\n" for address in addresses]
    aliases = spec.get("hostAliases") or ()
    if aliases:
        lines.append("\n# Entries added by HostAliases.\n")
        lines += [f"{each['ip']}\t" + "\t".join(each.get("hostnames") or ()) + "\n" for each in aliases]
    return _HEAD + "".join(lines)


def resolver(pod: Mapping[str, Any]) -> str | None:
    """Return /etc/resolv.conf; None if the pod uses the machine's."""
    spec = pod["spec"]
    policy = spec.get("dnsPolicy") or "ClusterFirst"
    if policy == "Default" or (policy == "ClusterFirst" and spec.get("hostNetwork")):
        return None
    text = "" if policy == "None" else resolv_conf(pod["metadata"].get("namespace", ""))
    return _with(text, spec.get("dnsConfig") or {})


def _with(text: str, more: Mapping[str, Any]) -> str:
    """Merge a `dnsConfig`: its searches and nameservers are appended, its options take precedence."""
    searches: list[str] = []
    servers: list[str] = []
    options: dict[str, str] = {}
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        if word == "search":
            searches += rest.split()
        elif word == "nameserver":
            servers.append(rest)
        elif word == "options":
            options.update(dict(_option(each) for each in rest.split()))
    searches = list(dict.fromkeys([*searches, *(more.get("searches") or ())]))
    servers = list(dict.fromkeys([*servers, *(more.get("nameservers") or ())]))
    options |= {str(each["name"]): str(each.get("value") or "") for each in more.get("options") or ()}
    lines = [f"search {' '.join(searches)}\n"] if searches else []
    lines += [f"nameserver {each}\n" for each in servers]
    if options:
        words = (f"{name}:{value}" if value else name for name, value in options.items())
        lines.append(f"options {' '.join(words)}\n")
    return "".join(lines)


def _option(text: str) -> tuple[str, str]:
    name, _, value = text.partition(":")
    return name, value
