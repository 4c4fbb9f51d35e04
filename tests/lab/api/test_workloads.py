"""DaemonSets, StatefulSets, Jobs, CronJobs, and Ingresses in the API: defaults, messages, and columns."""

from datetime import UTC, timedelta

import pytest
from tests.lab.controllers.world import START, World, cron_job, daemon_set, job, stateful_set

from narthex.lab.api import protobuf
from narthex.lab.api.columns import built_in_columns
from narthex.lab.api.errors import StatusError
from narthex.lab.api.registry import stamp


def created(obj):
    return World(begin=False).registry.create(obj["kind"], obj)


def refused(obj):
    with pytest.raises(StatusError) as error:
        created(obj)
    causes = error.value.details["causes"]
    return [f"{each['field']}: {each['message']}" for each in causes]


def ingress(*paths, **spec):
    rules = [{"host": "shop.example.com", "http": {"paths": list(paths)}}] if paths else []
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "Ingress",
        "metadata": {"name": "web", "namespace": "shop"},
        "spec": {"rules": rules, **spec},
    }


def path(path="/", type="Prefix", service="web", **port):
    backend = {"service": {"name": service, "port": port or {"number": 80}}}
    return {"path": path, "pathType": type, "backend": backend}


def test_defaults_of_a_daemon_set():
    spec = created(daemon_set())["spec"]
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0}}
    assert (spec["updateStrategy"], spec["revisionHistoryLimit"]) == (rolling, 10)


def test_defaults_of_a_stateful_set():
    made = stateful_set()
    del made["spec"]["replicas"]
    spec = created(made)["spec"]
    assert (spec["replicas"], spec["podManagementPolicy"]) == (1, "OrderedReady")
    assert spec["updateStrategy"] == {"type": "RollingUpdate", "rollingUpdate": {"partition": 0}}
    assert spec["persistentVolumeClaimRetentionPolicy"] == {"whenDeleted": "Retain", "whenScaled": "Retain"}


def test_defaults_of_a_job():
    made = created(job())
    spec, uid = made["spec"], made["metadata"]["uid"]
    numbers = ("completions", "parallelism", "backoffLimit", "suspend", "completionMode", "podReplacementPolicy")
    assert [spec[name] for name in numbers] == [1, 1, 6, False, "NonIndexed", "TerminatingOrFailed"]
    assert spec["selector"] == {"matchLabels": {"batch.kubernetes.io/controller-uid": uid}}
    labels = {"batch.kubernetes.io/controller-uid": uid, "controller-uid": uid}
    labels |= {"batch.kubernetes.io/job-name": "work", "job-name": "work"}
    assert spec["template"]["metadata"]["labels"] == made["metadata"]["labels"] == labels
    assert "completions" not in created(job(parallelism=2))["spec"]


def test_a_cron_job_s_template_has_no_defaults_of_jobs():
    spec = created(cron_job())["spec"]
    assert (spec["concurrencyPolicy"], spec["successfulJobsHistoryLimit"], spec["failedJobsHistoryLimit"]) == (
        "Allow",
        3,
        1,
    )
    assert set(spec["jobTemplate"]["spec"]) == {"template"}


def rolling(**limits):
    return {"type": "RollingUpdate", "rollingUpdate": limits}


@pytest.mark.parametrize(
    ("obj", "expected"),
    [
        (
            daemon_set(updateStrategy=rolling(maxUnavailable=0, maxSurge=0)),
            "spec.updateStrategy.rollingUpdate.maxUnavailable: Required value: cannot be 0 when maxSurge is 0",
        ),
        (
            daemon_set(updateStrategy=rolling(maxUnavailable=1, maxSurge="10%")),
            'spec.updateStrategy.rollingUpdate.maxSurge: Invalid value: "10%": may not be set when maxUnavailable is non-zero',
        ),
        (
            daemon_set(updateStrategy={"type": "Recreate"}),
            'spec.updateStrategy.type: Unsupported value: "Recreate": supported values: "OnDelete", "RollingUpdate"',
        ),
        (
            daemon_set(pod={"restartPolicy": "Never"}),
            'spec.template.spec.restartPolicy: Unsupported value: "Never": supported values: "Always"',
        ),
        (
            {**stateful_set(), "spec": {**stateful_set()["spec"], "selector": {"matchLabels": {"app": "x"}}}},
            'spec.template.metadata.labels: Invalid value: {"app":"db"}: `selector` does not match template `labels`',
        ),
        (
            stateful_set(podManagementPolicy="Sometimes"),
            "spec.podManagementPolicy: Invalid value: \"Sometimes\": must be 'OrderedReady' or 'Parallel'",
        ),
        (
            stateful_set(updateStrategy=rolling(partition=-1)),
            "spec.updateStrategy.rollingUpdate.partition: Invalid value: -1: must be greater than or equal to 0",
        ),
        (job(restart="Always"), 'spec.template.spec.restartPolicy: Required value: valid values: "OnFailure", "Never"'),
        (job(completions=-1), "spec.completions: Invalid value: -1: must be greater than or equal to 0"),
        (
            job(completionMode="Sometimes"),
            'spec.completionMode: Unsupported value: "Sometimes": supported values: "Indexed", "NonIndexed"',
        ),
        (
            job(completionMode="Indexed", parallelism=2, completions=None),
            "spec.completions: Required value: when completion mode is Indexed",
        ),
        (
            job(completionMode="Indexed", completions=100_001),
            "spec.completions: Invalid value: 100001: must be less than or equal to 100000",
        ),
        (
            cron_job(schedule="TZ=UTC * * * * *"),
            'spec.schedule: Invalid value: "TZ=UTC * * * * *": cannot use TZ or CRON_TZ in schedule, use timeZone field instead',
        ),
        (
            cron_job(schedule="* * * *"),
            'spec.schedule: Invalid value: "* * * *": expected exactly 5 fields, found 4: [* * * *]',
        ),
        (ingress(), "spec: Invalid value: []: either `defaultBackend` or `rules` must be specified"),
        (ingress(path("web")), 'spec.rules[0].http.paths[0].path: Invalid value: "web": must be an absolute path'),
        (ingress(path("/a//b")), "spec.rules[0].http.paths[0].path: Invalid value: \"/a//b\": must not contain '//'"),
        (ingress(path(type=None)), "spec.rules[0].http.paths[0].pathType: Required value: pathType must be specified"),
        (ingress(path(service="")), "spec.rules[0].http.paths[0].backend.service.name: Required value"),
        (
            ingress(path(name="http", number=80)),
            'spec.rules[0].http.paths[0].backend: Invalid value: "": cannot set both port name & port number',
        ),
        (
            ingress(rules=[{"host": "10.0.0.1"}]),
            'spec.rules[0].host: Invalid value: "10.0.0.1": must be a DNS name, not an IP address',
        ),
    ],
)
def test_refusals_have_upstream_s_words(obj, expected):
    assert refused(obj) == [expected]


def test_what_may_not_change():
    world = World()
    world.put(stateful_set())
    with pytest.raises(StatusError) as error:
        world.patch("StatefulSet", "db", serviceName="other")
    assert error.value.message.endswith(
        "spec: Forbidden: updates to statefulset spec for fields other than 'replicas', 'ordinals', 'template', "
        "'updateStrategy', 'revisionHistoryLimit', 'persistentVolumeClaimRetentionPolicy' and 'minReadySeconds' are forbidden"
    )
    world.put(job())
    with pytest.raises(StatusError) as error:
        world.patch("Job", "work", completions=5)
    assert error.value.message.endswith("spec.completions: Invalid value: 5: field is immutable")


def test_protobuf_has_all_that_controllers_write():
    world = World()
    for obj in (daemon_set(), stateful_set(), job(), ingress(path())):
        world.put(obj)
    kinds = ("DaemonSet", "StatefulSet", "Job", "Ingress", "ControllerRevision", "Pod")
    for raw in (each for kind in kinds for each in world.list(kind)):
        # A number that is 0 may be absent.
        found = protobuf.decode(protobuf.encode(raw))
        assert {**found, "status": None} == {**raw, "status": None}


def conditions(*types):
    return [{"type": each, "status": "True"} for each in types]


LATER = START + timedelta(minutes=5)


@pytest.mark.parametrize(
    ("kind", "spec", "status", "expected"),
    [
        (
            "DaemonSet",
            {"template": {"spec": {"nodeSelector": {"disk": "ssd"}}}},
            {"desiredNumberScheduled": 3, "currentNumberScheduled": 2, "numberReady": 1, "numberAvailable": 1},
            ["x", 3, 2, 1, 0, 1, "disk=ssd", "5m"],
        ),
        ("StatefulSet", {"replicas": 3}, {"readyReplicas": 2}, ["x", "2/3", "5m"]),
        ("Job", {"completions": 3}, {"succeeded": 1}, ["x", "Running", "1/3", "", "5m"]),
        ("Job", {"parallelism": 2}, {}, ["x", "Running", "0/1 of 2", "", "5m"]),
        (
            "Job",
            {"completions": 1},
            {
                "succeeded": 1,
                "startTime": stamp(START),
                "completionTime": stamp(START + timedelta(seconds=9)),
                "conditions": conditions("SuccessCriteriaMet", "Complete"),
            },
            ["x", "Complete", "1/1", "9s", "5m"],
        ),
        (
            "Job",
            {},
            {"conditions": conditions("FailureTarget"), "startTime": stamp(START)},
            ["x", "FailureTarget", "0/1", "5m", "5m"],
        ),
        (
            "CronJob",
            {"schedule": "@daily", "suspend": False},
            {"active": [{}], "lastScheduleTime": stamp(START + timedelta(minutes=4))},
            ["x", "@daily", "<none>", "False", 1, "60s", "5m"],
        ),
        (
            "CronJob",
            {"schedule": "@daily", "timeZone": "UTC"},
            {},
            ["x", "@daily", "UTC", "<unset>", 0, "<none>", "5m"],
        ),
    ],
)
def test_columns_are_upstream_s(kind, spec, status, expected):
    raw = {"metadata": {"name": "x", "creationTimestamp": stamp(START)}, "spec": spec, "status": status}
    columns = built_in_columns(kind)
    narrow = [index for index, each in enumerate(columns.definitions) if not each["priority"]]
    row = columns.row(raw, LATER.astimezone(UTC))
    assert [row[index] for index in narrow] == expected
