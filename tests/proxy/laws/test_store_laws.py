"""The Store holds what a naive one holds, whatever is taken in at once, and old Snapshots stay as they were."""

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from narthex.model.objects import EndpointSlice
from narthex.model.store import Delete, Snapshot, Store, Synced
from narthex.testing import strategies as some


class Naive:
    """All objects by kind and key, copied at every look."""

    def __init__(self):
        self.objects, self.synced = {}, False

    def apply(self, event):
        """Whether it changed something, and the object as it was before."""
        if isinstance(event, Synced):
            changed, self.synced = not self.synced, True
            return changed, None
        if isinstance(event, Delete):
            before = self.objects.pop((event.kind, event.key), None)
            return before is not None, before
        place = type(event.object).__name__, event.object.key
        before = self.objects.get(place)
        self.objects[place] = event.object
        return before != event.object, before

    @property
    def slices(self):
        found = {}
        for (kind, _), each in sorted(self.objects.items(), key=lambda item: item[0][1]):
            if kind == "EndpointSlice" and each.service_name:
                found.setdefault(each.service, {})[each.name] = each
        return found


def held(snapshot):
    """A Snapshot as the naive store has it."""
    tables = msgspec.structs.asdict(snapshot)
    del tables["slices"], tables["synced"]
    return {(type(each).__name__, key): each for table in tables.values() for key, each in table.items()}


def contents(snapshot: Snapshot):
    return held(snapshot), {key: dict(each) for key, each in snapshot.slices.items()}, snapshot.synced


@settings(max_examples=60)
@given(st.lists(st.lists(some.events(), max_size=6), max_size=5))
def test_holds_what_a_naive_store_holds(turns):
    store, naive, past = Store(), Naive(), []
    for turn in turns:
        told = []
        store.apply_all(turn, lambda event, before, told=told: told.append((event, before)))
        said = [(event, before) for event in turn for changed, before in [naive.apply(event)] if changed]
        assert [event for event, _ in told if not of_no_service(event)] == [
            event for event, _ in said if not of_no_service(event)
        ]
        slices = naive.slices
        others = {place: each for place, each in naive.objects.items() if place[0] != "EndpointSlice"}
        assert contents(store.snapshot) == (others, slices, naive.synced)
        assert all(list(each) == sorted(each) for each in store.snapshot.slices.values())
        past.append((store.snapshot, contents(store.snapshot)))
    assert all(contents(snapshot) == as_it_was for snapshot, as_it_was in past)


@settings(max_examples=40)
@given(st.lists(some.events(), max_size=12))
def test_one_by_one_or_all_at_once_is_the_same(events):
    at_once, one_by_one = Store(), Store()
    at_once.apply_all(events)
    for event in events:
        one_by_one.apply(event)
    assert contents(at_once.snapshot) == contents(one_by_one.snapshot)
    assert at_once.take_changed() == one_by_one.take_changed()
    assert at_once.take_changed_pods() == one_by_one.take_changed_pods()


@settings(max_examples=40)
@given(st.lists(some.events(), max_size=8))
def test_what_changes_nothing_leaves_the_identical_snapshot(events):
    store = Store()
    store.apply_all(events)
    last = {}
    for event in events:
        if not isinstance(event, Delete | Synced):
            last[type(event.object).__name__, event.object.key] = event
    before = store.snapshot
    present = [event for place, event in last.items() if held_by(before, event.object)]
    assert store.apply_all(present) is before


def held_by(snapshot, obj):
    if isinstance(obj, EndpointSlice):
        return snapshot.slices.get(obj.service, {}).get(obj.name) == obj
    return held(snapshot).get((type(obj).__name__, obj.key)) == obj


def of_no_service(event):
    """Slices that belong to nothing are not held, so nobody can say whether one of them is new."""
    return not isinstance(event, Synced) and (
        event.kind == "EndpointSlice" if isinstance(event, Delete) else isinstance(event.object, EndpointSlice)
    )
