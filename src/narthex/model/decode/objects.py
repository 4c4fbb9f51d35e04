"""Decoding of Kubernetes YAML and JSON into objects. The only entry point: all data in an object was validated here.

Strict where the API server is strict, since manifests may never have passed one: an invalid object is rejected with every
error named. Lenient where kube-proxy is: objects stored by older or newer API servers are accepted. Fields that Narthex
does not use are not validated.

An object that an API server serves has passed its validation: whatever is odd in it costs only the field or list item
itself, with a warning. It is rejected only without a name, a `spec` (Service), or an address type (EndpointSlice). The
`spec` of a ServiceCIDR, IPAddressPool, or L2Advertisement is used as a whole or not at all: half of it would mean more.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import msgspec

from narthex.model.decode.balancing import address_pool, l2_advertisement
from narthex.model.decode.cluster import deployment, namespace, node, pod, service_cidr
from narthex.model.decode.service import service
from narthex.model.decode.slice import endpoint_slice
from narthex.model.objects import AnyObject, NamespacedName
from narthex.model.problem import Problem, ProblemCollector, ProblemList, kind_of, one_of, quoted, steps, wrong_type
from narthex.model.validate import DNS_LABEL, DNS_SUBDOMAIN
from narthex.model.wire import (
    AnyWire,
    WireDeployment,
    WireEndpointSlice,
    WireIPAddressPool,
    WireL2Advertisement,
    WireMeta,
    WireNamed,
    WireNamespace,
    WireNode,
    WirePod,
    WireService,
    WireServiceCIDR,
    WireTypeMeta,
)

if TYPE_CHECKING:
    from narthex.model.documents import Document

__all__ = [
    "MAX_BYTES",
    "Decoded",
    "Identity",
    "Loaded",
    "Problem",
    "decode",
    "decode_json",
    "decode_shape",
    "load",
    "shape_of",
]

MAX_BYTES = 64 * 1024 * 1024
"""Maximum size of a file."""
MAX_BROKEN = 1000
"""Documents and objects of a file that may be invalid. After these, the rest is not read: it would take long for nothing."""

MAX_ODD_FIELDS = 100
"""Values of a wrong type in one served object that are ignored; each costs another look at the whole object."""

Identity = tuple[str, NamespacedName]
"""Kind, namespace, and name."""


class Decoded(msgspec.Struct, frozen=True):
    """One decoded object, or the problems that prevented it."""

    object: AnyObject | None
    problems: tuple[Problem, ...] = ()
    identity: Identity | None = None
    """Identity of the object, even if it was rejected; None if unknown."""


class Loaded(msgspec.Struct, frozen=True):
    """The objects of a file."""

    objects: tuple[AnyObject, ...] = ()
    problems: tuple[Problem, ...] = ()
    refused: frozenset[Identity] = frozenset()
    """Objects in the file that have an error."""
    whole: bool = True
    """False if part of the file could not even be identified: a missing object may still be intended."""


class _Kind(msgspec.Struct, frozen=True):
    api_versions: tuple[str, ...]
    shape: type[Any]
    make: Callable[[Any, ProblemCollector], AnyObject | None]
    namespaced: bool = True
    lenient: bool = True
    """Odd values in the `spec` of a served object are ignored."""

    @property
    def group(self) -> str:
        """API group of the kind."""
        return self.api_versions[0].rpartition("/")[0]


_KINDS = {
    "Service": _Kind(("v1",), WireService, service),
    "EndpointSlice": _Kind(("discovery.k8s.io/v1",), WireEndpointSlice, endpoint_slice),
    "Node": _Kind(("v1",), WireNode, node, namespaced=False),
    "ServiceCIDR": _Kind(
        ("networking.k8s.io/v1", "networking.k8s.io/v1beta1"),
        WireServiceCIDR,
        service_cidr,
        namespaced=False,
        lenient=False,
    ),
    "Pod": _Kind(("v1",), WirePod, pod),
    "Deployment": _Kind(("apps/v1",), WireDeployment, deployment),
    "Namespace": _Kind(("v1",), WireNamespace, namespace, namespaced=False),
    "IPAddressPool": _Kind(("metallb.io/v1beta1",), WireIPAddressPool, address_pool, lenient=False),
    "L2Advertisement": _Kind(("metallb.io/v1beta1",), WireL2Advertisement, l2_advertisement, lenient=False),
}
KINDS = tuple(_KINDS)
"""All kinds that can be decoded."""
_OLD_GROUPS = {("extensions", "Deployment")}

_UNUSED_CORE_KINDS = (
    "ConfigMap",
    "Endpoints",
    "Event",
    "LimitRange",
    "PersistentVolume",
    "PersistentVolumeClaim",
    "PodTemplate",
    "ReplicationController",
    "ResourceQuota",
    "Secret",
    "ServiceAccount",
)
"""The other kinds of apiVersion v1 that manifests may contain."""


def decode(raw: Any, origin: str = "", locate: Callable[[str], str] | None = None, *, served: bool = False) -> Decoded:
    """Decode one object from plain JSON or YAML values. Never raises.

    `origin` is its `file:line`; `locate` returns the `file:line` of a field path. `served` objects come from an API server;
    values of `raw` that have a wrong type are then removed from it.
    """
    if not isinstance(raw, dict):
        return _refused(origin, f"is {kind_of(raw)}, not a Kubernetes object: apiVersion, kind, metadata, ...")
    label, identity = _identify(raw)
    report = ProblemCollector(origin, label, locate)
    kind = _kind_of(raw, report)
    if kind is None:
        ours = report.failed and identity is not None and identity[0] in _KINDS
        return Decoded(None, report.problems, identity if ours else None)
    report.served = served
    try:
        shaped = _shaped(raw, kind, report)
    except RecursionError:
        report.reject("", "is nested too deep")
    else:
        return Decoded(kind.make(shaped, report) if shaped is not None else None, report.problems, identity)
    return Decoded(None, report.problems, identity)


def _shaped(raw: dict[str, Any], kind: _Kind, report: ProblemCollector) -> Any:
    """Convert plain values to the wire type; None after an error. Removes values of a wrong type from a served object."""
    for _ in range(MAX_ODD_FIELDS):
        try:
            return msgspec.convert(raw, kind.shape)
        except msgspec.ValidationError as error:
            field, message = _explain(str(error), raw)
        *path, last = steps(field) or ("",)
        if not (report.served and last != "" and (kind.lenient or path[:1] == ["metadata"])):
            report.reject(field, message)
            return None
        report.error(field, message)
        inside: Any = raw
        for step in path:
            inside = inside[step]
        del inside[last]
    report.reject("", f"has more than {MAX_ODD_FIELDS} values of a wrong type")
    return None


def decode_json(data: bytes | msgspec.Raw, origin: str = "", kind: str = "", *, served: bool = False) -> Decoded:
    """Decode one object from JSON text, as fast as possible. Never raises.

    `kind` is set if it is known, as for the items of a list. `served` objects come from an API server.
    """
    try:
        return _typed(data, origin, kind, served)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return _refused(origin, f"not valid JSON: {error}")
    except Exception as error:
        # A bug in the decoder must affect only one object.
        named = _named(data)
        return _broken(named.metadata, kind or named.kind or "", origin, error)


def _broken(meta: WireMeta | None, kind: str, origin: str, error: Exception) -> Decoded:
    """Return the result for an object on which the decoder itself failed."""
    meta = meta if meta is not None else WireMeta()
    known = _KINDS.get(kind)
    label, identity = _identity(kind, known is not None and known.namespaced, meta.namespace, meta.name)
    message = f"the decoder failed on it, please report this: {type(error).__name__}: {error}"
    return Decoded(None, (Problem(origin=origin, object=label, message=message),), identity)


_NAMED, _HEADS = msgspec.json.Decoder(WireNamed), msgspec.json.Decoder(WireTypeMeta)


def _named(data: bytes | msgspec.Raw) -> WireNamed:
    try:
        return _NAMED.decode(data)
    except msgspec.MsgspecError:
        return WireNamed()


def _typed(data: bytes | msgspec.Raw, origin: str, kind: str, served: bool) -> Decoded:
    known = _KINDS.get(kind)
    if known is None:
        try:
            head = _HEADS.decode(data)
        except msgspec.ValidationError:
            head = WireTypeMeta()
        kind = head.kind or ""
        known = _KINDS.get(kind)
        if known is None or head.apiVersion not in known.api_versions:
            return decode(msgspec.json.decode(data), origin, served=served)
    try:
        shaped = msgspec.json.decode(data, type=known.shape)
    except msgspec.ValidationError:  # The slow path can report the invalid value.
        raw = msgspec.json.decode(data)
        described = {"apiVersion": known.api_versions[0], "kind": kind}
        return decode(described | raw if isinstance(raw, dict) else raw, origin, served=served)
    return _made(shaped, known, kind, origin, served)


def decode_shape(shaped: AnyWire, kind: str) -> Decoded:
    """Decode one object of an API server from its wire type (`shape_of`). Never raises."""
    try:
        return _made(shaped, _KINDS[kind], kind, "", served=True)
    except Exception as error:
        return _broken(shaped.metadata, kind, "", error)


def shape_of(kind: str) -> Any:
    """Return the wire type of a kind, for JSON decoders; `msgspec.Raw` if there is none."""
    return _KINDS[kind].shape if kind in _KINDS else msgspec.Raw


def _made(shaped: Any, known: _Kind, kind: str, origin: str, served: bool) -> Decoded:
    report = ProblemCollector(origin, served=served)
    made = known.make(shaped, report)
    if made is not None and not report.problems:
        return Decoded(made, (), (kind, made.key))
    # The label is computed only if there are problems to report.
    meta = shaped.metadata if shaped.metadata is not None else WireMeta()
    label, identity = _identity(kind, known.namespaced, meta.namespace, meta.name)
    report = ProblemCollector(origin, label, served=served)
    return Decoded(known.make(shaped, report), report.problems, identity)


DecodeFunction = Callable[[Any, str, Callable[[str], str] | None], Decoded]


def load(data: bytes, origin: str, decoding: DecodeFunction = decode) -> Loaded:
    """Load all objects of a file: YAML documents, JSON values, and items of `kind: List`. Never raises.

    `origin` is the file name; objects and problems get `origin:line`. `decoding` decodes each object.
    """
    if len(data) > MAX_BYTES:
        return _unreadable(origin, f"holds {len(data)} bytes, at most {MAX_BYTES} are read")
    if not data.strip():
        return _unreadable(origin, "the file is empty; delete it if that is meant")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return _not_text(data, error.start, origin)
    if "\0" in text:
        return _not_text(data, data.index(0), origin)
    return _collect(text, origin, decoding)


def _not_text(data: bytes, at: int, origin: str) -> Loaded:
    line = data.count(b"\n", 0, at) + 1
    what = f"byte 0x{data[at]:02x} at offset {at}"
    return _unreadable(f"{origin}:{line}", f"the file is not UTF-8 text ({what}), so it is neither YAML nor JSON")


def _unreadable(origin: str, message: str) -> Loaded:
    return Loaded(problems=(Problem(origin=origin, message=message),), whole=False)


def _collect(text: str, origin: str, decoding: DecodeFunction) -> Loaded:
    objects: list[AnyObject] = []
    problems = ProblemList(origin=origin)
    refused: set[Identity] = set()
    whole, empty, broken = True, True, 0
    for found in _decode_documents(text, origin, decoding):
        empty = False
        problems.extend(found.problems)
        if found.object is not None:
            objects.append(found.object)
        elif any(problem.severity == "error" for problem in found.problems):
            broken += 1
            whole = whole and found.identity is not None
            refused |= {found.identity} if found.identity is not None else set()
            if broken > MAX_BROKEN:
                message = f"more than {MAX_BROKEN} objects cannot be used; the rest of the file is not read"
                return Loaded(
                    tuple(objects),
                    (Problem(origin=origin, message=message), *problems.problems),
                    frozenset(refused),
                    whole=False,
                )
    if empty:
        problems.append(Problem(origin=origin, message="holds no object", severity="warning"))
    return Loaded(tuple(objects), problems.problems, frozenset(refused), whole)


def _decode_documents(text: str, origin: str, decoding: DecodeFunction) -> Iterator[Decoded]:
    """Yield the objects of all documents; malformed documents are objects without an identity."""
    # Imported late: the YAML reader takes a tenth of a proxy's start-up, and is not needed with an API server.
    from narthex.model.documents import MalformedDocument, read_documents

    for document in read_documents(text):
        if isinstance(document, MalformedDocument):
            yield Decoded(None, (Problem(origin=f"{origin}:{document.line}", message=document.message),))
        else:
            yield from _decode_document(document, origin, decoding)


def _decode_document(document: Document, origin: str, decoding: DecodeFunction) -> Iterator[Decoded]:
    for raw, start in _items(document.value, (), document):

        def locate(field: str, raw: Any = raw, start: int = start) -> str:
            """Return the `file:line` of a field."""
            return f"{origin}:{document.line_of(raw, steps(field), start)}"

        yield decoding(raw, f"{origin}:{start}", locate)


def _items(value: Any, path: tuple[str | int, ...], document: Document) -> Iterator[tuple[Any, int]]:
    """Yield the objects of a document with their lines: the object itself, or the items of a `List` or `ServiceList`."""
    kind = value.get("kind") if isinstance(value, dict) else None
    if not isinstance(kind, str) or not kind.endswith("List") or not isinstance(value.get("items"), list):
        yield value, document.line_of(document.value, path, document.line)
        return
    inherited = {"apiVersion": value.get("apiVersion"), "kind": kind[: -len("List")]} if kind != "List" else {}
    for index, item in enumerate(value["items"]):
        if isinstance(item, dict):
            for key, word in inherited.items():
                item.setdefault(key, word)
        yield from _items(item, (*path, "items", index), document)


def _refused(origin: str, message: str) -> Decoded:
    return Decoded(None, (Problem(origin=origin, object="", field="", message=message),))


def _identify(raw: dict[str, Any]) -> tuple[str, Identity | None]:
    kind, meta = raw.get("kind"), raw.get("metadata")
    meta = meta if isinstance(meta, dict) else {}
    namespaced = _KINDS[kind].namespaced if isinstance(kind, str) and kind in _KINDS else "namespace" in meta
    return _identity(kind, namespaced, meta.get("namespace"), meta.get("name"))


def _identity(kind: object, namespaced: bool, namespace: object, name: object) -> tuple[str, Identity | None]:
    """Return the object's label for messages, and its identity if its names are valid."""
    word = kind if isinstance(kind, str) and _KIND_WORD.fullmatch(kind) else "object"
    where = (namespace or "default") if namespaced else ""
    if not name:
        return f"{word} without name", None
    safe_name = name if isinstance(name, str) and DNS_SUBDOMAIN.holds(name) else None
    safe_where = where if isinstance(where, str) and (not where or DNS_LABEL.holds(where)) else None
    shown = f"{quoted(where) if safe_where is None else safe_where}/" if where else ""
    label = f"{word} {shown}{quoted(name) if safe_name is None else safe_name}"
    if safe_name is None or safe_where is None:
        return label, None
    return label, (word, NamespacedName(safe_where, safe_name))


_KIND_WORD = re.compile(r"[A-Za-z][A-Za-z0-9]{0,62}")


def _kind_of(raw: dict[str, Any], report: ProblemCollector) -> _Kind | None:
    """Return the kind if it is supported; otherwise report the problem and return None."""
    for key in ("apiVersion", "kind"):
        if not isinstance(raw.get(key), str) or not raw[key]:
            report.error(key, "is required: a Kubernetes object has apiVersion, kind and metadata")
            return None
    version, kind = cast(str, raw["apiVersion"]), cast(str, raw["kind"])
    group, known = version.rpartition("/")[0], _KINDS.get(kind)
    if known is not None and version in known.api_versions:
        return known
    if known is not None and (group == known.group or (group, kind) in _OLD_GROUPS):
        report.error("apiVersion", f"{quoted(version)} has no {kind}; write {one_of(known.api_versions)}")
    elif version == "v1" and kind not in _UNUSED_CORE_KINDS:
        near = difflib.get_close_matches(kind, [*_KINDS, *_UNUSED_CORE_KINDS], 1, 0.7)
        report.error("kind", f"{quoted(kind)} is not a kind of v1" + (f"; did you mean {near[0]}?" if near else ""))
    elif not isinstance(meta := raw.get("metadata"), dict) or not isinstance(meta.get("name"), str) or not meta["name"]:
        report.error("metadata.name", "is required")
    else:
        report.warning("kind", f"{quoted(kind)} of {quoted(version)} is not used here, ignored")
    return None


_SHAPE_ERROR = re.compile(
    r"Expected `(?P<want>[^`]*)`(?:, got `(?P<got>[^`]*)`)?(?: - at (?P<key>`key` in )?`(?P<at>[^`]*)`)?"
)
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a mapping",
}


def _explain(error: str, raw: Any) -> tuple[str, str]:
    """Return field and message of a msgspec error about a value of the wrong type."""
    match = _SHAPE_ERROR.match(error)
    if match is None:
        return "", error
    field = (match["at"] or "").removeprefix("$").removeprefix(".")
    if match["key"]:
        return field, "a key is not text"
    value = raw
    for step in steps(field):
        value = value[step]
    expected = [word for word in match["want"].split(" | ") if word != "null"]
    return field, wrong_type(value, one_of(_WORDS.get(word, word) for word in expected))
