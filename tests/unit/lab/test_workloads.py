"""Deployments become pods, pods get nodes and addresses."""

from msgspec.structs import replace

from narthex.lab import topology
from narthex.lab.controllers import Cluster, objects, reconcile, without_pods
from narthex.lab.workloads import Scale
from narthex.model.objects import EndpointSlice, Node, Pod

from .clusters import LABELS, NODES, NOW, WEB, deployment, on_nodes, service, snapshot, start, step, template


def names(cluster):
    return [pod.pod.name for pod in cluster.pods]


def test_a_deployment_becomes_pods_spread_over_nodes():
    cluster = start(deployment(5))
    assert on_nodes(cluster) == {"node-1": 3, "node-2": 2}
    assert all(name.startswith("web-") for name in names(cluster))
    assert len({ip for pod in cluster.pods for ip in pod.pod.ips}) == 10
    assert not any(pod.pod.ips for pod in reconcile(snapshot(deployment(5)), {}, Cluster(nodes=NODES), NOW).pods)
    assert not cluster.problems


def test_pods_have_the_templates_labels_and_a_revision():
    pod = start(deployment()).pods[0].pod
    assert dict(pod.labels)["app"] == "web"
    assert pod.name.startswith(f"web-{dict(pod.labels)['pod-template-hash']}-")


def test_nothing_changes_without_a_reason():
    cluster = start(deployment(4))
    assert step(cluster, deployment(4)) == cluster


def test_the_same_manifests_give_the_same_pods_anywhere():
    assert names(start(deployment(3))) == names(start(deployment(3)))


def test_more_replicas_keep_the_pods_that_are_there():
    before = start(deployment(2))
    after = step(before, deployment(3))
    assert after.pods[:2] == before.pods
    assert on_nodes(after) == {"node-1": 2, "node-2": 1}


def test_fewer_replicas_mark_pods_of_the_fullest_node_and_keep_them_answering():
    before = start(deployment(3))
    after = step(before, deployment(1))
    leaving = [pod for pod in after.pods if pod.terminating]
    assert on_nodes(after) == {"node-1": 1} or on_nodes(after) == {"node-2": 1}
    assert [pod.pod.deletion_timestamp for pod in leaving] == [NOW, NOW]
    assert all(pod.pod.ready for pod in leaving)
    assert {pod.pod.spec.node_name for pod in leaving} == {"node-1", "node-2"}


def test_unready_pods_go_first():
    before = start(deployment(2))
    broken = replace(before.pods[0], pod=replace(before.pods[0].pod, ready=False))
    after = step(replace(before, pods=(broken, before.pods[1])), deployment(1))
    assert [pod.terminating for pod in after.pods] == [True, False]


def test_a_pod_on_its_way_out_is_replaced_under_another_name():
    before = step(start(deployment(2)), deployment(1))
    after = step(before, deployment(2))
    assert len(set(names(after))) == 3
    assert on_nodes(after) == {"node-1": 1, "node-2": 1}


def test_another_template_replaces_all_pods():
    before = start(deployment(2))
    after = step(before, deployment(2, template=template(port=9090)))
    assert [pod.terminating for pod in after.pods] == [True, True, False, False]
    assert on_nodes(after) == {"node-1": 1, "node-2": 1}


def test_a_deleted_deployment_takes_its_pods_away():
    assert all(pod.terminating for pod in step(start(deployment(2))).pods)


def test_a_removed_pod_is_gone():
    before = step(start(deployment(2)))
    assert without_pods(before, frozenset(pod.key for pod in before.pods)).pods == ()


def test_scale_holds_until_the_manifest_says_another_number():
    scales = {WEB: Scale(replicas=3, manifest=1)}
    assert len(step(start(deployment(1)), deployment(1), scales=scales).pods) == 3
    assert len(step(start(deployment(2)), deployment(2), scales=scales).pods) == 2


def test_zero_replicas():
    assert start(deployment(0)).pods == ()


def test_a_selector_that_misses_the_template_is_refused():
    cluster = start(deployment(2, selector=(("app", "other"),)))
    assert cluster.pods == ()
    assert [problem.field for problem in cluster.problems] == ["spec.selector"]


def test_pods_with_a_manifest_of_their_own():
    pod = Pod(name="db", namespace="shop", labels=LABELS, spec=template(), ips=("1.2.3.4",), ready=True)
    cluster = start(pod, deployment(1))
    assert cluster.pods[0].pod.name == "db"
    assert cluster.pods[0].pod.ips[0].startswith("10.244.")
    changed = step(cluster, replace(pod, spec=template(port=1)), deployment(1))
    assert changed.pods[0].terminating
    gone = without_pods(changed, frozenset([changed.pods[0].key]))
    assert not step(gone, replace(pod, spec=template(port=1)), deployment(1)).pods[-1].terminating


def test_node_name_and_node_selector_choose():
    zone = Node(name="node-2", labels=(("disk", "ssd"),))
    chosen = start(deployment(3, template=template(node_selector=(("disk", "ssd"),))), zone)
    assert on_nodes(chosen) == {"node-2": 3}
    assert on_nodes(start(deployment(2, template=template(node_name="node-1")))) == {"node-1": 2}


def test_a_node_that_does_not_exist_is_a_problem_and_stays_one():
    wanted = deployment(1, template=template(node_name="node-9"))
    for cluster in (first := start(wanted), step(first, wanted)):
        assert [pod.placed for pod in cluster.pods] == [False]
        assert "node-9" in cluster.problems[0].message


def test_a_full_lab_leaves_pods_waiting():
    cluster = step(Cluster(nodes=NODES[:1]), deployment(topology.MAX_PODS_PER_NODE + 1))
    assert [pod.placed for pod in cluster.pods].count(False) == 1
    assert "no room" in cluster.problems[0].message


def test_host_network_pods_have_the_nodes_addresses():
    pod = start(deployment(1, template=template(host_network=True))).pods[0]
    assert pod.pod.ips == NODES[0].addresses


def test_nodes_that_the_lab_does_not_have_are_reported():
    cluster = start(Node(name="elsewhere"))
    assert "elsewhere" in cluster.problems[0].object
    assert cluster.problems[0].severity == "warning"


def test_a_lost_node_and_its_pods_are_not_ready_and_it_gets_no_more():
    wanted = (deployment(2), service())
    cluster = replace(start(*wanted), lost=frozenset({"node-1"}))
    things = objects(snapshot(*wanted), cluster)
    assert {each.name: each.ready for each in things if isinstance(each, Node)} == {"node-1": False, "node-2": True}
    pods = {each.spec.node_name: each.ready for each in things if isinstance(each, Pod)}
    ends = {end.node_name: end.ready for each in things if isinstance(each, EndpointSlice) for end in each.endpoints}
    assert pods == ends == {"node-1": False, "node-2": True}
    grown = step(cluster, deployment(4), service())
    assert (on_nodes(grown), grown.lost) == ({"node-1": 1, "node-2": 3}, {"node-1"})
