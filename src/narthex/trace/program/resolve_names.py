"""A destination that was given as a name: what the sender's resolver asks for, and what the cluster's DNS answers."""

from __future__ import annotations

from narthex.dns.search import Asked, NameWay, look_up, pod_search
from narthex.trace.causes.names import name_not_found
from narthex.trace.model import NameLookup
from narthex.trace.program.places import AddressOwner, OwnerIndex, TraceError


def by_name(places: OwnerIndex, source: AddressOwner, name: str, domain: str) -> AddressOwner:
    """The place that a pod reaches by a name. Raises TraceError, with all that was asked, when it reaches none."""
    pod = source if source.kind == "pod" else places.at(source.addresses[0])
    if pod is None or pod.kind != "pod":
        raise TraceError(
            f"{name!r} is a name for the cluster's DNS, which pods ask, and {source.name} is no pod that is known; "
            "name a Service as NAMESPACE/NAME, or give an address"
        )
    namespace = pod.name.partition("/")[0]
    try:
        way = look_up(name, pod_search(namespace, domain), places.snapshot, domain)
    except ValueError as error:
        raise TraceError(f"the name {name!r} or the domain {domain!r} {error}") from error
    told = tuple(NameLookup(question=each.name, answer=_answer(each)) for each in way.asked)
    if not way.addresses:
        questions = [f"{each.question}: {each.answer}" for each in told]
        services = map(str, sorted(places.snapshot.services))
        found = name_not_found(name, f"pod {pod.name}", questions, services, _advice(way))
        asked = "".join(f"\n  {question}" for question in questions)
        raise TraceError(f"{found.sentence}; it asks for{asked}\n{found.advice}\nMore in {found.cause.page}.")
    if way.musl_stops:
        told += (
            NameLookup(
                question="note",
                answer=f"a resolver of musl (Alpine) stops at {way.musl_stops}, which exists but is empty",
            ),
        )
    service = places.of(way.addresses[0])
    first = places.at(way.addresses[0])
    return AddressOwner(
        kind="Service" if service else first.kind if first else "address",
        name=name,
        addresses=way.addresses,
        node=first.node if first and not service else "",
        service=service,
        lookup=told,
    )


def _answer(asked: Asked) -> str:
    if asked.alias:
        return f"an alias of {asked.alias}, which is not the cluster's"
    return ", ".join(asked.addresses) or {
        "nothing": "exists, without an address",
        "elsewhere": "not the cluster's; the servers behind its DNS are asked",
    }.get(asked.answer, asked.answer)


def _advice(way: NameWay) -> str:
    last = way.asked[-1]
    if last.alias:
        return f"Trace to the address that {last.alias} has."
    if any(each.answer == "nothing" for each in way.asked):
        return "A name that exists has no address: a namespace alone, or a Service of another IP family."
    return (
        "No Service goes by this name, or it is headless and nothing is ready. A Service is NAME, NAME.NAMESPACE or "
        "NAME.NAMESPACE.svc."
    )
