"""Discovery: which groups, versions and resources there are, plain and aggregated (KEP-3352)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

from narthex.lab.api.kinds import Kind, group_version, newest_first
from narthex.lab.api.paths import Paths

VERSION = "v1.34.0"
"""What the API says it is."""
_STATUS_VERBS = ("get", "patch", "update")
SUBRESOURCES: Mapping[str, tuple[tuple[str, str, str], tuple[str, ...]]] = {
    "scale": (("autoscaling", "v1", "Scale"), _STATUS_VERBS),
    "binding": (("", "v1", "Binding"), ("create",)),
    "eviction": (("policy", "v1", "Eviction"), ("create",)),
    "exec": (("", "v1", "PodExecOptions"), ("create", "get")),
    "attach": (("", "v1", "PodAttachOptions"), ("create", "get")),
    "log": (("", "v1", "Pod"), ("get",)),
}
"""The kind of a subresource and its verbs, where it is not the object itself."""
REVIEWS = ("SelfSubjectAccessReview", "SelfSubjectRulesReview")
"""Questions of authorization.k8s.io that are answered and not kept."""
_NOBODY = [{"clientCIDR": "0.0.0.0/0", "serverAddress": ""}]


def version() -> dict[str, str]:
    """What /version says."""
    major, minor, _ = VERSION.removeprefix("v").split(".")
    return {
        "major": major,
        "minor": minor,
        "gitVersion": f"{VERSION}+narthex",
        "gitCommit": "",
        "gitTreeState": "clean",
        "buildDate": "1970-01-01T00:00:00Z",
        "goVersion": "",
        "compiler": "",
        "platform": "linux/amd64",
    }


def versions() -> dict[str, Any]:
    """What /api says."""
    return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": _NOBODY}


def groups(paths: Paths) -> dict[str, Any]:
    """What /apis says."""
    listed = [_group(name, found) for name, found in _served(paths).items() if name]
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}


def group(paths: Paths, name: str) -> dict[str, Any] | None:
    """What /apis/NAME says; None when there is no such group."""
    found = _served(paths).get(name)
    return None if found is None or not name else {"kind": "APIGroup", "apiVersion": "v1", **_group(name, found)}


def resources(paths: Paths, group: str, version: str) -> dict[str, Any] | None:
    """What /api/v1 and /apis/GROUP/VERSION say; None when there is no such version."""
    if version not in _served(paths).get(group, ()):
        return None
    listed: list[dict[str, Any]] = []
    for kind in _of(paths, group, version):
        entry = {
            "name": kind.plural,
            "singularName": kind.singular,
            "namespaced": kind.namespaced,
            "kind": kind.kind,
            "verbs": list(kind.verbs),
        }
        if kind.short_names:
            entry["shortNames"] = list(kind.short_names)
        if kind.categories:
            entry["categories"] = list(kind.categories)
        listed.append(entry)
        for part, (of_group, of_version, of_kind), verbs in _parts(kind, version):
            below = {"name": f"{kind.plural}/{part}", "singularName": "", "namespaced": kind.namespaced}
            other = {} if of_group == group else {"group": of_group, "version": of_version}
            listed.append({**below, **other, "kind": of_kind, "verbs": list(verbs)})
    if group == "authorization.k8s.io":
        listed += [_review(each) for each in REVIEWS]
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": group_version(group, version),
        "resources": listed,
    }


def aggregated(paths: Paths, version: str, *, core: bool) -> dict[str, Any]:
    """All of /api (`core`) or /apis in one document."""
    items = []
    for name, found in _served(paths).items():
        if bool(name) is core:
            continue
        listed = [
            {"version": each, "resources": _aggregated(paths, name, each), "freshness": "Current"} for each in found
        ]
        items.append({"metadata": {"name": name} if name else {}, "versions": listed})
    api_version = f"apidiscovery.k8s.io/{version}"
    return {"kind": "APIGroupDiscoveryList", "apiVersion": api_version, "metadata": {}, "items": items}


def _aggregated(paths: Paths, group: str, version: str) -> list[dict[str, Any]]:
    listed = []
    for kind in _of(paths, group, version):
        entry: dict[str, Any] = {
            "resource": kind.plural,
            "responseKind": {"group": group, "version": version, "kind": kind.kind},
            "scope": "Namespaced" if kind.namespaced else "Cluster",
            "singularResource": kind.singular,
            "verbs": list(kind.verbs),
            "shortNames": list(kind.short_names),
            "categories": list(kind.categories),
            "subresources": [
                {
                    "subresource": part,
                    "responseKind": dict(zip(("group", "version", "kind"), of, strict=True)),
                    "verbs": list(verbs),
                }
                for part, of, verbs in _parts(kind, version)
            ],
        }
        listed.append({name: value for name, value in entry.items() if value})
    if group == "authorization.k8s.io":
        for each in REVIEWS:
            of = {"group": group, "version": version, "kind": each}
            plain = {"resource": f"{each.lower()}s", "responseKind": of, "scope": "Cluster"}
            listed.append({**plain, "singularResource": each.lower(), "verbs": ["create"]})
    return listed


def _review(kind: str) -> dict[str, Any]:
    plural = f"{kind.lower()}s"
    return {"name": plural, "singularName": kind.lower(), "namespaced": False, "kind": kind, "verbs": ["create"]}


def _parts(kind: Kind, version: str) -> Iterator[tuple[str, tuple[str, str, str], tuple[str, ...]]]:
    own = ((kind.group, version, kind.kind), _STATUS_VERBS)
    for part in sorted(kind.subresources):
        if part == "status" or part in SUBRESOURCES:
            of, verbs = SUBRESOURCES.get(part, own)
            yield part, of, verbs


def _served(paths: Paths) -> dict[str, list[str]]:
    """Versions by group, each in the order of preference; groups by name, those of custom kinds last."""
    pairs = sorted({(group, version) for group, version, _ in paths} | {("authorization.k8s.io", "v1")})
    found = {name: newest_first(version for _, version in each) for name, each in groupby(pairs, lambda pair: pair[0])}
    custom = {kind.group for kind in paths.values() if kind.custom}
    return dict(sorted(found.items(), key=lambda entry: (entry[0] in custom, entry[0])))


def _of(paths: Paths, group: str, version: str) -> Iterable[Kind]:
    found = {plural: kind for (each, at, plural), kind in paths.items() if (each, at) == (group, version)}
    return [kind for _, kind in sorted(found.items())]


def _group(name: str, found: list[str]) -> dict[str, Any]:
    listed = [{"groupVersion": group_version(name, version), "version": version} for version in found]
    return {"name": name, "versions": listed, "preferredVersion": listed[0]}
