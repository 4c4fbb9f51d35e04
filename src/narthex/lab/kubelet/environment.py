"""What containers see: environment variables, command lines, /etc/hosts, and /etc/resolv.conf.

Follows Kubernetes 1.34: kubelet_pods.go (makeEnvironmentVariables, podFieldSelectorRuntimeValue,
managedHostsFileContent), envvars.go, network/dns/dns.go, third_party/forked/golang/expansion.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from narthex.lab.cluster import DOMAIN, resolv_conf

Object = Mapping[str, Any]
Lookup = Callable[[str, str], Object | None]
"""Returns an object of the pod's namespace by kind and name."""

_REFERENCE = re.compile(r"\$(?:\$|\(([^)]*)\))")
_SUBSCRIPT = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_HOSTS_HEAD = """\
# Kubernetes-managed hosts file.
127.0.0.1\tlocalhost
::1\tlocalhost ip6-localhost ip6-loopback
fe00::0\tip6-localnet
fe00::0\tip6-mcastprefix
fe00::1\tip6-allnodes
fe00::2\tip6-allrouters
"""


class ContainerConfigError(ValueError):
    """A container whose configuration is invalid; the message is a kubelet's."""


def expand(text: str, known: Mapping[str, str]) -> str:
    """Replace `$(NAME)` where NAME is defined, and `$$` by `$`."""

    def replaced(found: re.Match[str]) -> str:
        """Return the variable's value, the reference itself if the variable is unknown, or `$` for `$$`."""
        return "$" if found[1] is None else known.get(found[1], found[0])

    return _REFERENCE.sub(replaced, text)


def environment(pod: Object, container: Object, services: Iterable[Object], lookup: Lookup) -> dict[str, str]:
    """Return all variables of a container. Raises ContainerConfigError.

    Args:
        pod: The pod, whose status holds its addresses.
        container: The container's spec.
        services: Services of the pod's namespace, and `default/kubernetes`.
        lookup: Finds ConfigMaps and Secrets.
    """
    made: dict[str, str] = {"PATH": _PATH, "HOSTNAME": hostname(pod)}
    given: dict[str, str] = {}
    for source in container.get("envFrom") or ():
        given.update(_all_of(source, lookup))
    offered = _of_services(pod, services)
    for entry in container.get("env") or ():
        name = str(entry["name"])
        if entry.get("valueFrom"):
            value = _value_from(entry["valueFrom"], pod, container, lookup)
            if value is None:
                continue
        else:
            value = expand(str(entry.get("value") or ""), {**offered, **given})
        given[name] = value
    return {**made, **offered, **given}


def command_line(
    container: Object, entry_point: Sequence[str], arguments: Sequence[str], known: Mapping[str, str]
) -> tuple[str, ...]:
    """Return what to execute: `command`, or the image's entry point; then `args`, or the image's arguments without both."""
    command, args = ([expand(str(word), known) for word in container.get(field) or ()] for field in ("command", "args"))
    return (*(command or entry_point), *(args or ([] if command else arguments)))


def hostname(pod: Object) -> str:
    """Return the pod's host name: `hostnameOverride`, with hostNetwork the node's, or at most 63 characters of others."""
    if pod["spec"].get("hostnameOverride"):
        return str(pod["spec"]["hostnameOverride"])
    if pod["spec"].get("hostNetwork") and pod["spec"].get("nodeName"):
        return str(pod["spec"]["nodeName"])
    return str(pod["spec"].get("hostname") or pod["metadata"]["name"])[:63].rstrip("-.")


def _of_services(pod: Object, services: Iterable[Object]) -> dict[str, str]:
    namespace = pod["metadata"].get("namespace", "")
    links = pod["spec"].get("enableServiceLinks", True)
    made: dict[str, str] = {}
    for service in services:
        metadata, spec = service["metadata"], service.get("spec") or {}
        master = (metadata.get("namespace"), metadata["name"]) == ("default", "kubernetes")
        address = spec.get("clusterIP") or ""
        if address in ("", "None") or not spec.get("ports"):
            continue
        if master or (links and metadata.get("namespace") == namespace):
            made.update(_of_service(metadata["name"], address, spec["ports"]))
    return made


def _of_service(name: str, address: str, ports: Iterable[Object]) -> dict[str, str]:
    prefix = name.upper().replace("-", "_")
    bracketed = f"[{address}]" if ":" in address else address
    made: dict[str, str] = {f"{prefix}_SERVICE_HOST": address}
    for number, port in enumerate(ports):
        protocol = str(port.get("protocol") or "TCP")
        if not number:
            made[f"{prefix}_SERVICE_PORT"] = str(port["port"])
            made[f"{prefix}_PORT"] = f"{protocol.lower()}://{bracketed}:{port['port']}"
        if port.get("name"):
            made[f"{prefix}_SERVICE_PORT_{port['name'].upper().replace('-', '_')}"] = str(port["port"])
        link = f"{prefix}_PORT_{port['port']}_{protocol}"
        made |= {
            link: f"{protocol.lower()}://{bracketed}:{port['port']}",
            f"{link}_PROTO": protocol.lower(),
            f"{link}_PORT": str(port["port"]),
            f"{link}_ADDR": address,
        }
    return made


def _all_of(source: Object, lookup: Lookup) -> dict[str, str]:
    prefix = str(source.get("prefix") or "")
    for field, kind in (("configMapRef", "ConfigMap"), ("secretRef", "Secret")):
        if reference := source.get(field):
            values = _data_of(reference, kind, lookup)
            return {prefix + key: _text(kind, value) for key, value in values.items()}
    return {}


def _data_of(reference: Object, kind: str, lookup: Lookup) -> Object:
    """Return the data of a ConfigMap or Secret; empty if it is missing and optional. Raises ContainerConfigError."""
    held = lookup(kind, str(reference["name"]))
    if held is None and not reference.get("optional"):
        raise ContainerConfigError(f'{kind.lower()} "{reference["name"]}" not found')
    return (held or {}).get("data") or {}


def _value_from(source: Object, pod: Object, container: Object, lookup: Lookup) -> str | None:
    if field := source.get("fieldRef"):
        return field_value(pod, str(field["fieldPath"]))
    if resource := source.get("resourceFieldRef"):
        return _resource(container, str(resource["resource"]))
    for field_name, kind in (("configMapKeyRef", "ConfigMap"), ("secretKeyRef", "Secret")):
        if reference := source.get(field_name):
            values = _data_of(reference, kind, lookup)
            if reference["key"] in values:
                return _text(kind, values[reference["key"]])
            if reference.get("optional"):
                return None
            where = f"{pod['metadata'].get('namespace', '')}/{reference['name']}"
            raise ContainerConfigError(f"couldn't find key {reference['key']} in {kind} {where}")
    return ""


def field_value(pod: Object, path: str) -> str:
    """Return a field of the downward API. Raises ContainerConfigError."""
    metadata, spec, status = pod["metadata"], pod["spec"], pod.get("status") or {}
    if subscript := _SUBSCRIPT.fullmatch(path):
        return str((metadata.get(subscript[1]) or {}).get(subscript[2], ""))
    values = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata.get("namespace", ""),
        "metadata.uid": metadata.get("uid", ""),
        "metadata.labels": _lines(metadata.get("labels") or {}),
        "metadata.annotations": _lines(metadata.get("annotations") or {}),
        "spec.nodeName": spec.get("nodeName", ""),
        "spec.serviceAccountName": spec.get("serviceAccountName", "default"),
        "status.hostIP": status.get("hostIP", ""),
        "status.hostIPs": ",".join(each["ip"] for each in status.get("hostIPs") or ()),
        "status.podIP": status.get("podIP", ""),
        "status.podIPs": ",".join(each["ip"] for each in status.get("podIPs") or ()),
    }
    if path not in values:
        raise ContainerConfigError(f"unsupported fieldPath: {path}")
    return str(values[path])


def _resource(container: Object, resource: str) -> str:
    amounts, _, name = resource.partition(".")
    return str(((container.get("resources") or {}).get(amounts) or {}).get(name, "0"))


def _lines(values: Mapping[str, str]) -> str:
    return "\n".join(f'{key}="{value}"' for key, value in sorted(values.items()))


def _text(kind: str, value: Any) -> str:
    if kind != "Secret":
        return str(value)
    try:
        return base64.b64decode(str(value)).decode(errors="replace")
    except binascii.Error:
        return ""


def hosts(pod: Object, addresses: Iterable[str]) -> str:
    """Return /etc/hosts."""
    spec, name = pod["spec"], hostname(pod)
    if spec.get("subdomain") and not spec.get("hostnameOverride"):
        name = f"{name}.{spec['subdomain']}.{pod['metadata'].get('namespace', '')}.svc.{DOMAIN}\t{name}"
    lines = [f"{address}\t{name}\n" for address in addresses]
    aliases = spec.get("hostAliases") or ()
    if aliases:
        lines.append("\n# Entries added by HostAliases.\n")
        lines += [f"{each['ip']}\t" + "\t".join(each.get("hostnames") or ()) + "\n" for each in aliases]
    return _HOSTS_HEAD + "".join(lines)


def resolver(pod: Object) -> str | None:
    """Return /etc/resolv.conf; None if the pod uses the machine's."""
    spec = pod["spec"]
    policy = spec.get("dnsPolicy") or "ClusterFirst"
    if policy == "Default" or (policy == "ClusterFirst" and spec.get("hostNetwork")):
        return None
    text = "" if policy == "None" else resolv_conf(pod["metadata"].get("namespace", ""))
    return _with(text, spec.get("dnsConfig") or {})


def _with(text: str, more: Object) -> str:
    """Merge a `dnsConfig`: its searches and nameservers are appended, its options take precedence."""
    given = {word: rest for word, *rest in map(str.split, text.splitlines())}
    searches = dict.fromkeys([*given.get("search", ()), *(more.get("searches") or ())])
    servers = dict.fromkeys([*given.get("nameserver", ()), *(more.get("nameservers") or ())])
    options = dict(each.partition(":")[::2] for each in given.get("options", ()))
    options |= {str(each["name"]): str(each.get("value") or "") for each in more.get("options") or ()}
    lines = [f"search {' '.join(searches)}\n"] if searches else []
    lines += [f"nameserver {each}\n" for each in servers]
    if options:
        words = (f"{name}:{value}" if value else name for name, value in options.items())
        lines.append(f"options {' '.join(words)}\n")
    return "".join(lines)
