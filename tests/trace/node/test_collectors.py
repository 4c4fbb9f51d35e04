"""How `kubectl narthex` gets the state of nodes: through Narthex's pods, and otherwise through pods with few rights."""

import pytest

from narthex.trace.node.collectors import collector_pod, collectors, intention


def pod(image, *, container="narthex", node="a", host=True, phase="Running"):
    return {
        "metadata": {"namespace": "net", "name": f"p-{node}"},
        "spec": {"nodeName": node, "hostNetwork": host, "containers": [{"name": container, "image": image}]},
        "status": {"phase": phase},
    }


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (pod("narthex"), "narthex"),
        (pod("example.org:5000/net/narthex:1.2"), "narthex"),
        (pod("example.org/narthex@sha256:00"), "narthex"),
        (pod("narthex/kube-proxy", container="kube-proxy"), "script"),
        (pod("example.org/kube-proxy:v1.34", container="kube-proxy"), "new"),
        (pod("example.org/not-narthex:1"), "new"),
        (pod("narthex", container="dns"), "new"),
        (pod("narthex", host=False), "new"),
        (pod("narthex", phase="Pending"), "new"),
        (pod("narthex", node="b"), "new"),
    ],
)
def test_only_running_pods_of_narthex_on_the_node_are_used(made, kind):
    (found,) = collectors(["a"], [made], "run", "kube-system")
    assert (found.node, found.kind) == ("a", kind)
    assert (found.namespace, found.pod) == (
        ("kube-system", "narthex-collector-run-0") if kind == "new" else ("net", "p-a")
    )
    assert collectors(["a"], [made], "run", "kube-system", new=True)[0].kind == "new"


def test_a_new_pod_is_not_privileged_and_ends_by_itself():
    (found,) = collectors(["a"], [], "run", "kube-system")
    made = collector_pod(found, "run", "busybox")
    (container,) = made["spec"]["containers"]
    assert not container["securityContext"].get("privileged")
    assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
    assert [mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")] == ["/host/tmp"]
    assert made["spec"]["activeDeadlineSeconds"] > 0
    assert made["spec"]["automountServiceAccountToken"] is False


def test_what_runs_is_said_with_its_permissions():
    chosen = collectors(["a", "b"], [pod("narthex")], "run", "kube-system")
    text = intention(["kubectl", "--context", "my cluster"], ("nodes",), chosen, "busybox")
    assert "kubectl --context 'my cluster' exec -n net p-a -c narthex -- narthex bundle --node a\n" in text
    assert "kubectl --context 'my cluster' delete pod -n kube-system narthex-collector-run-1\n" in text
    assert text.endswith(
        "Permissions: create pods/exec in namespace kube-system; create pods/exec in namespace net; "
        "create, get, watch, and delete pods in namespace kube-system; list nodes\n"
    )
