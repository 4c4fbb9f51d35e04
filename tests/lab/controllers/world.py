"""A lab's API and controllers in made-up time, with a kubelet that does what it is told."""

from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

from narthex.lab.api.errors import forbidden
from narthex.lab.api.registry import Registry, stamp
from narthex.lab.controllers.controller_manager import lab_controllers, run_until_stable
from narthex.lab.controllers.objects import is_terminating, spec_of, with_condition
from narthex.lab.controllers.service.admission import ServiceAllocator, admission

START = datetime(2026, 1, 1, tzinfo=UTC)


class World:
    """Objects go in by `put`, time by `wait`; after each, the controllers have come to rest."""

    def __init__(self, nodes: int = 3, control: Any = None, begin: bool = True) -> None:
        self.now = START
        numbers = count(1)
        self.forbidden: set[Any] = set()
        """Kinds of which nothing may be made."""
        self.checks = True
        """Whether the API looks at what is written."""
        self._checked, self._unchecked = admission(), ServiceAllocator().admit
        self.registry = Registry(lambda: self.now, lambda n: next(numbers).to_bytes(n, "big"), admit=self._admit)
        self.control = control if control is not None else lab_controllers()
        self.refused: list[Any] = []
        for name in ("shop", "other", "default", "kube-node-lease"):
            self.registry.create("Namespace", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        for index in range(1, nodes + 1):
            self.registry.create("Node", node(f"node-{index}"))
        if begin:
            self.settle()

    def _admit(self, registry: Any, kind: Any, held: Any, new: Any, subresource: str) -> Any:
        if kind.name in self.forbidden and held is None:
            raise forbidden(kind.plural, kind.group, new["metadata"]["name"], "no more room")
        admit = self._checked if self.checks else self._unchecked
        return admit(registry, kind, held, new, subresource)

    def settle(self) -> None:
        run_until_stable(self.control, self.registry, self.now)
        self.refused += self.control.problems.values()

    def wait(self, seconds: float = 0.0) -> None:
        """Let time pass, as the loop of the lab would: from one thing that is due to the next."""
        end = self.now + timedelta(seconds=seconds)
        self.settle()
        while (due := self.control.next_due(self.registry, self.now)) is not None:
            if self.now + timedelta(seconds=due) > end:
                break
            self.now += timedelta(seconds=max(due, 0.001))
            self.settle()
        self.now = max(self.now, end)
        self.settle()

    # Users.

    def put(self, obj: dict[str, Any]) -> Any:
        """Create it, or change what there is of that name."""
        metadata = obj["metadata"]
        held: Any = self.registry.get(obj["kind"], metadata.get("namespace", ""), metadata["name"])
        if held is None:
            self.registry.create(obj["kind"], obj)
        else:
            kept = {**held["metadata"], **metadata}
            self.registry.update(obj["kind"], {**held, **obj, "metadata": kept})
        self.settle()
        return self.get(obj["kind"], metadata["name"], metadata.get("namespace", ""))

    def patch(self, kind: str, name: str, namespace: str = "shop", **spec: Any) -> Any:
        held: Any = self.registry.get(kind, namespace, name)
        self.registry.update(kind, {**held, "spec": {**held["spec"], **spec}})
        self.settle()
        return self.get(kind, name, namespace)

    def delete(self, kind: str, name: str, namespace: str = "shop", grace: Any = None) -> None:
        self.registry.delete(kind, namespace, name, grace=grace)
        self.settle()

    def get(self, kind: str, name: str, namespace: str = "shop") -> Any:
        return self.registry.get(kind, namespace, name)

    def list(self, kind: str, namespace: str = "shop") -> Any:
        return self.registry.list(kind, namespace)

    def events(self, reason: str | None = None, namespace: str = "shop") -> Any:
        return [
            (each["reason"], each["message"])
            for each in self.registry.list("Event", namespace)
            if reason in (None, each["reason"])
        ]

    # The kubelet.

    def run_pods(self, *, ready: bool = True) -> None:
        """Pods with a node get an address and run; those that leave are gone."""
        for pod in self.registry.list("Pod"):
            if is_terminating(pod):
                metadata = pod["metadata"]
                self.registry.delete("Pod", metadata["namespace"], metadata["name"], grace=0)
            elif spec_of(pod).get("nodeName") and not (pod.get("status") or {}).get("podIP"):
                self.set_ready(pod, ready, settle=False)
        self.settle()

    def set_ready(self, pod: Any, ready: bool = True, *, settle: bool = True, phase: str = "Running") -> None:
        metadata = pod["metadata"]
        held: Any = self.registry.get("Pod", metadata["namespace"], metadata["name"])
        conditions = with_condition(
            (held.get("status") or {}).get("conditions") or [],
            {"type": "Ready", "status": "True" if ready else "False"},
            self.now,
        )
        number = int(metadata["uid"][-4:], 16)
        status = {
            **(held.get("status") or {}),
            "phase": phase,
            "conditions": conditions,
            "podIP": f"10.244.{number // 250}.{number % 250 + 2}",
            "podIPs": [{"ip": f"10.244.{number // 250}.{number % 250 + 2}"}, {"ip": f"fd00:10:244::{number:x}"}],
        }
        self.registry.update("Pod", {**held, "status": status}, subresource="status")
        if settle:
            self.settle()

    def converge(self, rounds: int = 60) -> None:
        """Until nothing changes any more."""
        for _ in range(rounds):
            before = self.registry.version
            self.run_pods()
            self.wait(1)
            if self.registry.version == before:
                return
        raise AssertionError("does not come to rest")


def node(name: str, *, ready: bool = True, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
        "spec": spec,
        "status": {
            "conditions": [
                {"type": "Ready", "status": "True" if ready else "False", "lastTransitionTime": stamp(START)}
            ],
            "allocatable": {"pods": "110"},
        },
    }


def template(labels: dict[str, str] | None = None, image: str = "echo:1", **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {"labels": labels or {"app": "web"}},
        "spec": {
            "containers": [{"name": "web", "image": image, "ports": [{"name": "http", "containerPort": 8080}]}],
            **spec,
        },
    }


def deployment(
    replicas: int = 3, name: str = "web", *, image: str = "echo:1", labels: dict[str, str] | None = None, **spec: Any
) -> dict[str, Any]:
    labels = labels or {"app": name}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": "shop"},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": template(labels, image),
            **spec,
        },
    }


def replica_set(replicas: int = 3, name: str = "web", **spec: Any) -> dict[str, Any]:
    return {**deployment(replicas, name, **spec), "kind": "ReplicaSet"}


def pod(
    name: str = "web", labels: dict[str, str] | None = None, namespace: str = "shop", **spec: Any
) -> dict[str, Any]:
    made = template(labels, **spec)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, **made["metadata"]},
        "spec": made["spec"],
    }


def service(name: str = "web", *, namespace: str = "shop", ports: Any = None, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "type": "ClusterIP",
            "selector": {"app": "web"},
            "ports": ports or [{"name": "http", "protocol": "TCP", "port": 80, "targetPort": "http"}],
            **spec,
        },
    }


def daemon_set(name: str = "agent", *, image: str = "echo:1", pod: Any = None, **spec: Any) -> dict[str, Any]:
    labels = {"app": name}
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": name, "namespace": "shop"},
        "spec": {"selector": {"matchLabels": labels}, "template": template(labels, image, **(pod or {})), **spec},
    }


def stateful_set(replicas: int = 3, name: str = "db", *, image: str = "echo:1", **spec: Any) -> dict[str, Any]:
    made = deployment(replicas, name, image=image, **{"serviceName": name, **spec})
    return {**made, "kind": "StatefulSet"}


def job_spec(restart: str = "Never", **spec: Any) -> dict[str, Any]:
    return {"template": {"spec": {"restartPolicy": restart, **template()["spec"]}}, **spec}


def job(name: str = "work", restart: str = "Never", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": "shop"},
        "spec": job_spec(restart, **spec),
    }


def cron_job(name: str = "tick", schedule: str = "*/5 * * * *", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "batch/v1",
        "kind": "CronJob",
        "metadata": {"name": name, "namespace": "shop"},
        "spec": {"schedule": schedule, "jobTemplate": {"spec": job_spec()}, **spec},
    }
