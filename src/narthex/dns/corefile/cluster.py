"""Lines of a Corefile about names that are known here: kubernetes, k8s_external, hosts, autopath."""

from __future__ import annotations

import re
from typing import Any

from narthex.dns.corefile.settings import LONGEST_TTL, Autopath, External, Hosts, Kubernetes, Zones
from narthex.dns.corefile.values import Line
from narthex.model import net, selector
from narthex.model.problem import quoted

_PODS = ("disabled", "insecure", "verified")
_WITHOUT_EFFECT = {
    "apiserver_qps": "it is never asked but for one list and one watch of each kind",
    "apiserver_burst": "it is never asked but for one list and one watch of each kind",
    "apiserver_max_inflight": "it is never asked but for one list and one watch of each kind",
    "resyncperiod": "nothing is synced on a timer",
    "upstream": "names outside the cluster are always resolved by this server itself",
}
_NOT_HERE = {
    "multicluster": "",
    "zonal": "",
    "tls": "; name these files in a kubeconfig",
}
_KUBERNETES = (
    "endpoint", "kubeconfig", "namespaces", "namespace_labels", "labels", "pods", "endpoint_pod_names", "ttl",
    "noendpoints", "fallthrough", "ignore", "startup_timeout", *_WITHOUT_EFFECT,
)  # fmt: skip


def kubernetes(line: Line, of_block: Zones) -> Kubernetes:
    """`kubernetes [ZONES...] { … }`"""
    zones = line.zones(line.words, of_block)
    found: dict[str, Any] = {}
    for option in line.options((*_KUBERNETES, *_NOT_HERE)):
        if option.name in _NOT_HERE:
            option.error(f"is not supported{_NOT_HERE[option.name]}")
        elif option.name in _WITHOUT_EFFECT:
            option.warning(f"has no effect: {_WITHOUT_EFFECT[option.name]}")
        else:
            found.update(_kubernetes_option(option))
    if "namespaces" in found and "namespace_labels" in found:
        line.error("namespaces and namespace_labels exclude each other")
    return Kubernetes(zones=zones, **found)


def _kubernetes_option(option: Line) -> dict[str, Any]:
    words = option.words
    match option.name:
        case "endpoint" if option.takes(1, 1):
            if re.fullmatch(r"https?://[^\s/?#@]+/?", words[0]):
                return {"endpoint": words[0].rstrip("/")}
            option.error(f"{quoted(words[0])} is not a URL such as https://10.0.0.1:6443")
        case "kubeconfig" if option.takes(1, 2):
            if len(words) == 1:
                return {"kubeconfig": words[0]}
            option.error(f"context {quoted(words[1])} cannot be chosen here; make it the file's current-context")
        case "namespaces" if option.takes(1):
            return {"namespaces": tuple(dict.fromkeys(words))}
        case "labels" | "namespace_labels" if option.takes(1):
            try:
                return {option.name: selector.parse(" ".join(words))}
            except ValueError as error:
                option.error(str(error))
        case "pods" if option.takes(1, 1):
            return _word(option, "pods", _PODS)
        case "ttl" if option.takes(1, 1):
            return _given(ttl=option.whole(words[0], 0, LONGEST_TTL))
        case "fallthrough":
            return {"fallthrough": option.zones(words, (".",))}
        case "startup_timeout" if option.takes(1, 1):
            return _given(startup_timeout=option.duration(words[0]))
        case "ignore" if option.takes(1, 1):
            if words[0] == "empty_service":
                return {"ignore_empty_service": True}
            option.error(f"{quoted(words[0])} is unknown; known is empty_service")
        case "endpoint_pod_names" if option.takes(0, 0):
            return {"endpoint_pod_names": True}
        case "noendpoints" if option.takes(0, 0):
            return {"endpoints": False}
    return {}


def external(line: Line, of_block: Zones) -> External:
    """`k8s_external [ZONE...] { … }`"""
    found: dict[str, Any] = {}
    for option in line.options(("apex", "ttl", "headless", "fallthrough")):
        words = option.words
        if option.name == "apex" and option.takes(1, 1):
            if re.fullmatch(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?", words[0], re.ASCII):
                found["apex"] = words[0].lower()
            else:
                option.error(f"{quoted(words[0])} is not a label")
        elif option.name == "ttl" and option.takes(1, 1):
            found.update(_given(ttl=option.whole(words[0], 0, LONGEST_TTL)))
        elif option.name == "headless" and option.takes(0, 0):
            found["headless"] = True
        elif option.name == "fallthrough":
            found["fallthrough"] = option.zones(words, (".",))
    return External(zones=line.zones(line.words, of_block), **found)


def hosts(line: Line, of_block: Zones) -> Hosts:
    """`hosts [FILE [ZONES...]] { … }`, with lines of a hosts file in the braces."""
    found: dict[str, Any] = {}
    inline: list[str] = []
    for option in line.options(("ttl", "no_reverse", "reload", "fallthrough"), other=True):
        words = option.words
        if option.name == "ttl" and option.takes(1, 1):
            found.update(_given(ttl=option.whole(words[0], 1, 2**31 - 1)))
        elif option.name == "no_reverse" and option.takes(0, 0):
            found["reverse"] = False
        elif option.name == "reload" and option.takes(1, 1):
            found.update(_given(reload=option.duration(words[0])))
        elif option.name == "fallthrough":
            found["fallthrough"] = option.zones(words, (".",))
        elif option.name not in ("ttl", "no_reverse", "reload"):
            if _is_address(option.name) and words:
                inline.append(" ".join((option.name, *words)))
            else:
                option.error("is neither an option (ttl, no_reverse, reload, fallthrough) nor an address with names")
    if line.words:
        found["path"] = line.words[0]
    return Hosts(zones=line.zones(line.words[1:], of_block), inline=tuple(inline), **found)


def autopath(line: Line, of_block: Zones) -> Autopath | None:
    """`autopath [ZONE...] RESOLV-CONF`"""
    line.takes_no_block()
    if not line.takes(1):
        return None
    *zones, source = line.words
    if source.startswith("@"):
        if source != "@kubernetes":
            line.error(f"{quoted(source)} is unknown; known is @kubernetes")
        source = ""
    return Autopath(zones=line.zones(zones, of_block), path=source)


def _is_address(word: str) -> bool:
    try:
        net.address(word)
    except ValueError:
        return False
    return True


def _word(option: Line, field: str, known: tuple[str, ...]) -> dict[str, Any]:
    if option.words[0] in known:
        return {field: option.words[0]}
    option.error(f"{quoted(option.words[0])} is unknown; known are {', '.join(known)}")
    return {}


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
