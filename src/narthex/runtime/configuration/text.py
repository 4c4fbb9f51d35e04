"""A configuration as its file would have it: the other direction of `configuration.parse`.

Every field is written, also those that hold defaults, so that a person sees what there is (row 27.26).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from narthex.model.duration import duration_text
from narthex.runtime.configuration.file import API_VERSION, KIND, OWN_API_VERSION, OWN_KIND
from narthex.runtime.configuration.values import ProxyConfiguration

_TIMES = ("Period", "Timeout", "Frequency")
_SPELLED = {"cidr": "CIDR", "cidrs": "CIDRs", "ips": "IPs", "arp": "ARP", "dsr": "DSR"}


def written(configuration: ProxyConfiguration) -> dict[str, Any]:
    """The KubeProxyConfiguration: camelCase names, times as Go writes them, nested mappings."""
    shown = _spelled(msgspec.to_builtins(configuration))
    del shown["own"], shown["nftables"]["localhostNodePorts"]
    shown["clusterCIDR"] = ",".join(shown.pop("clusterCIDRs"))
    shown["detectLocal"] = {name: shown.pop(name) for name in ("bridgeInterface", "interfaceNamePrefix")}
    shown["featureGates"] = dict(shown["featureGates"])
    shown["logging"]["vmodule"] = [
        {"filePattern": pattern, "verbosity": verbosity} for pattern, verbosity in shown["logging"]["vmodule"]
    ]
    return {"apiVersion": API_VERSION, "kind": KIND, **shown}


def own_written(configuration: ProxyConfiguration) -> dict[str, Any]:
    """The NarthexConfiguration."""
    return {
        "apiVersion": OWN_API_VERSION,
        "kind": OWN_KIND,
        **_spelled(msgspec.to_builtins(configuration.own)),
    }


def file_text(configuration: ProxyConfiguration) -> str:
    """Both as one YAML file."""
    # Loaded here: who only reads a configuration need not wait for it.
    import yaml  # type: ignore[import-untyped]

    text: str = yaml.safe_dump_all([written(configuration), own_written(configuration)], sort_keys=False)
    return text


def _spelled(fields: Mapping[str, Any]) -> dict[str, Any]:
    spelled: dict[str, Any] = {}
    for name, value in fields.items():
        first, *rest = name.split("_")
        camel = first + "".join(_SPELLED.get(word, word.capitalize()) for word in rest)
        if isinstance(value, dict):
            spelled[camel] = _spelled(value)
        elif isinstance(value, float) and camel.endswith(_TIMES):
            spelled[camel] = duration_text(value)
        else:
            spelled[camel] = list(value) if isinstance(value, tuple) else value
    return spelled
