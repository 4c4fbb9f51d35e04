"""Versions, conflicts, names, generations and deletion of objects, as kube-apiserver has them."""

import pytest

from narthex.lab.api.errors import StatusError
from narthex.lab.api.store import ObjectStore

from .registries import World, registry, thing


def fault(code, reason, do):
    with pytest.raises(StatusError) as caught:
        do()
    assert (caught.value.code, caught.value.reason) == (code, reason)
    return caught.value.message


def test_an_object_that_is_made_has_all_that_the_server_gives_it():
    held = registry()
    made = held.create("ConfigMap", thing("a", data={"x": "1"}, metadata={"labels": {"l": "m"}}))
    meta = made["metadata"]
    assert made["apiVersion"] == "v1"
    assert made["kind"] == "ConfigMap"
    assert made["data"] == {"x": "1"}
    assert meta["resourceVersion"] == str(held.version) == "1001"
    assert meta["creationTimestamp"] == "2026-05-05T10:00:00Z"
    assert len(meta["uid"]) == 36 and meta["uid"][14] == "4"
    assert "generation" not in meta
    assert held.get("ConfigMap", "shop", "a") is made
    message = fault(409, "AlreadyExists", lambda: held.create("ConfigMap", thing("a")))
    assert message == 'configmaps "a" already exists'


def test_what_is_not_asked_for_is_not_written():
    held = registry()
    assert held.create("ConfigMap", thing("a"), dry_run=True)["metadata"]["name"] == "a"
    assert held.list("ConfigMap") == []
    held.create("ConfigMap", thing("a"))
    assert held.delete("ConfigMap", "shop", "a", dry_run=True) is None
    held.update("ConfigMap", thing("a", data={"x": "1"}), dry_run=True)
    assert held.version == 1001


def test_generated_names_are_free_ones():
    held = registry()
    raw = {"metadata": {"generateName": "web-", "namespace": "shop"}}
    names = {held.create("Pod", raw)["metadata"]["name"] for _ in range(50)}
    assert len(names) == 50
    assert all(name.startswith("web-") and len(name) == 9 for name in names)


def test_lists_are_sorted_and_of_one_namespace_if_wished():
    held = registry()
    for name, namespace in (("b", "shop"), ("a", "shop"), ("a", "shop-2"), ("z", "bank")):
        held.create("ConfigMap", thing(name, namespace))
    keys = [(raw["metadata"]["namespace"], raw["metadata"]["name"]) for raw in held.list("ConfigMap")]
    assert keys == [("bank", "z"), ("shop", "a"), ("shop", "b"), ("shop-2", "a")]
    assert [raw["metadata"]["name"] for raw in held.list("ConfigMap", "shop")] == ["a", "b"]
    assert held.list("ConfigMap", "nowhere") == held.list("Pod") == []


def test_an_update_keeps_what_cannot_change_and_counts_versions():
    held = registry()
    made = held.create("ConfigMap", thing("a", data={"x": "1"}))
    written = held.update("ConfigMap", thing("a", data={"x": "2"}, metadata={"uid": made["metadata"]["uid"]}))
    assert written["data"] == {"x": "2"}
    assert written["metadata"] == {**made["metadata"], "resourceVersion": "1002"}
    again = held.update("ConfigMap", {**written, "metadata": {**written["metadata"], "labels": {"a": "b"}}})
    assert again["metadata"]["resourceVersion"] == "1003"
    assert held.update("ConfigMap", again) == again
    assert held.version == 1003
    message = fault(409, "Conflict", lambda: held.update("ConfigMap", written))
    assert message == (
        'Operation cannot be fulfilled on configmaps "a": the object has been modified; please apply your changes to the '
        "latest version and try again"
    )
    fault(404, "NotFound", lambda: held.update("ConfigMap", thing("b")))
    other = thing("a", metadata={"uid": "other"})
    assert "Precondition failed: UID" in fault(409, "Conflict", lambda: held.update("ConfigMap", other))


def test_generations_count_changes_of_the_spec_alone():
    held = registry()
    made = held.create("Deployment", thing("web", spec={"replicas": 1}))
    assert made["metadata"]["generation"] == 1
    labelled = held.update("Deployment", {**made, "metadata": {**made["metadata"], "labels": {"a": "b"}}})
    assert labelled["metadata"]["generation"] == 1
    scaled = held.update("Deployment", {**labelled, "spec": {"replicas": 2}})
    assert scaled["metadata"]["generation"] == 2
    told = held.update("Deployment", {**scaled, "status": {"replicas": 2}}, subresource="status")
    assert told["metadata"]["generation"] == 2
    assert told["status"] == {"replicas": 2}


def test_status_and_the_rest_are_written_apart():
    held = registry()
    pod = held.create("Pod", thing("a", spec={"nodeName": "n"}, status={"phase": "Pending"}))
    moved = {**pod, "spec": {"nodeName": "m"}, "status": {"phase": "Running"}}
    told = held.update("Pod", moved, subresource="status")
    assert (told["spec"], told["status"]) == ({"nodeName": "n"}, {"phase": "Running"})
    fresh = {**told, "spec": {"nodeName": "m"}, "status": {"phase": "Failed"}}
    written = held.update("Pod", fresh)
    assert (written["spec"], written["status"]) == ({"nodeName": "m"}, {"phase": "Running"})


def test_a_pod_on_a_node_gets_its_grace():
    world = World()
    held = registry(world)
    held.create("Pod", thing("a", spec={"nodeName": "n"}))
    ending = held.delete("Pod", "shop", "a")
    assert ending["metadata"]["deletionTimestamp"] == "2026-05-05T10:00:30Z"
    assert ending["metadata"]["deletionGracePeriodSeconds"] == 30
    assert ending["metadata"]["generation"] == 2
    world.later(10)
    version = held.version
    assert held.delete("Pod", "shop", "a", grace=60) == ending
    assert held.version == version
    shorter = held.delete("Pod", "shop", "a", grace=5)
    assert shorter["metadata"]["deletionTimestamp"] == "2026-05-05T10:00:05Z"
    status = {**shorter, "status": {"phase": "Running"}}
    assert held.update("Pod", status, subresource="status")["metadata"]["deletionGracePeriodSeconds"] == 5
    assert held.get("Pod", "shop", "a") is not None
    assert held.delete("Pod", "shop", "a", grace=0) is None
    assert held.get("Pod", "shop", "a") is None


@pytest.mark.parametrize(
    "more", [{"spec": {}}, {"spec": {"nodeName": "n"}, "status": {"phase": "Succeeded"}}], ids=["no node", "done"]
)
def test_a_pod_that_does_not_run_goes_at_once(more):
    held = registry()
    held.create("Pod", thing("a", **more))
    assert held.delete("Pod", "shop", "a") is None
    fault(404, "NotFound", lambda: held.delete("Pod", "shop", "a"))


def test_finalizers_hold_an_object_until_the_last_is_gone():
    held = registry()
    held.create("Service", thing("web", metadata={"finalizers": ["a/b"]}))
    ending = held.delete("Service", "shop", "web")
    assert ending["metadata"]["deletionTimestamp"] == "2026-05-05T10:00:00Z"
    kept = held.update("Service", {**ending, "spec": {"type": "ClusterIP"}})
    assert kept["spec"]
    held.update("Service", {**kept, "metadata": {**kept["metadata"], "finalizers": []}})
    assert held.get("Service", "shop", "web") is None


def test_preconditions_of_a_deletion():
    held = registry()
    meta = held.create("ConfigMap", thing("a"))["metadata"]
    for wrong in ({"uid": "other"}, {"resourceVersion": "1"}):
        fault(409, "Conflict", lambda wrong=wrong: held.delete("ConfigMap", "shop", "a", preconditions=wrong))
    right = {"uid": meta["uid"], "resourceVersion": meta["resourceVersion"]}
    assert held.delete("ConfigMap", "shop", "a", preconditions=right) is None


def test_a_namespace_ends_with_all_that_is_in_it_and_waits_for_pods():
    held = registry()
    held.create("Namespace", thing("shop", ""))
    held.create("ConfigMap", thing("a"))
    held.create("ConfigMap", thing("a", "other"))
    held.create("Pod", thing("a", spec={"nodeName": "n"}))
    ending = held.delete("Namespace", "", "shop")
    assert ending["status"]["phase"] == "Terminating"
    assert [raw["metadata"]["namespace"] for raw in held.list("ConfigMap")] == ["other"]
    assert held.get("Pod", "shop", "a")["metadata"]["deletionGracePeriodSeconds"] == 30
    held.delete("Pod", "shop", "a", grace=0)
    assert held.get("Namespace", "", "shop") is None
    held.create("Namespace", thing("empty", ""))
    assert held.delete("Namespace", "", "empty") is None


def test_a_namespace_with_many_objects_goes_at_once():
    held = registry()
    held.create("Namespace", thing("shop", ""))
    for number in range(1500):
        held.create("ConfigMap", thing(f"map-{number}"))
    assert held.delete("Namespace", "", "shop") is None
    assert held.list("ConfigMap") == []


def test_changes_are_told_in_order_until_they_are_forgotten():
    held = registry()
    start = held.version
    made = held.create("ConfigMap", thing("a"))
    written = held.update("ConfigMap", {**made, "data": {"x": "1"}})
    held.delete("ConfigMap", "shop", "a")
    changes = list(held.changes_since(start))
    assert [(change.kind, change.key, change.version) for change in changes] == [
        ("ConfigMap", ("shop", "a"), version) for version in (1001, 1002, 1003)
    ]
    assert [(change.before, change.after) for change in changes] == [(None, made), (made, written), (written, None)]
    assert list(held.changes_since(held.version)) == []
    held.store.compact()
    fault(410, "Expired", lambda: held.changes_since(start))


def test_the_past_does_not_grow_without_end(monkeypatch):
    monkeypatch.setattr("narthex.lab.api.store.MOST_CHANGES", 10)
    store = ObjectStore()
    for number in range(100):
        store.put("ConfigMap", {"metadata": {"name": str(number)}})
        assert len(store.changes(store.oldest)) <= 20
    assert len(store.changes(store.oldest)) >= 10


def test_a_definition_adds_a_kind():
    held = registry()
    fault(404, "NotFound", lambda: held.create("Shop.example.com", thing("a")))
    version = {"name": "v1", "served": True, "storage": True, "subresources": {"status": {}}}
    spec = {"group": "example.com", "scope": "Namespaced", "names": {"plural": "shops", "kind": "Shop"}}
    crd = {"metadata": {"name": "shops.example.com"}, "spec": {**spec, "versions": [version]}}
    held.create("CustomResourceDefinition", crd)
    made = held.create("Shop.example.com", thing("a", spec={"x": 1}))
    assert (made["apiVersion"], made["kind"], made["metadata"]["generation"]) == ("example.com/v1", "Shop", 1)
    held.delete("CustomResourceDefinition", "", "shops.example.com")
    assert "Shop.example.com" not in held.kinds
