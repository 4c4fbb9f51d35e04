"""A pod's status out of what its node knows."""

import pytest
from msgspec.structs import replace

from narthex.lab.kubelet.restarts import back_off
from narthex.lab.kubelet.status import ContainerFacts, PodFacts, Running, Terminated, Waiting, phase, status

NOW, LATER = "2026-01-31T12:00:00Z", "2026-01-31T12:00:05Z"
POD = {"metadata": {"name": "web", "namespace": "shop"}, "spec": {}}
RUNS = Running(NOW)
GOOD, BAD = Terminated(0, "Completed", NOW, LATER), Terminated(3, "Error", NOW, LATER)


def container(state, name="c", **more):
    return ContainerFacts(name=name, image="echo", state=state, **more)


def facts(*containers, **more):
    return PodFacts(containers=list(containers), **more)


@pytest.mark.parametrize(
    ("states", "policy", "expected"),
    [
        ([Waiting()], "Always", "Pending"),
        ([RUNS], "Always", "Running"),
        ([RUNS, Waiting()], "Always", "Pending"),
        ([GOOD], "Always", "Running"),
        ([GOOD], "Never", "Succeeded"),
        ([GOOD], "OnFailure", "Succeeded"),
        ([BAD], "Never", "Failed"),
        ([GOOD, BAD], "Never", "Failed"),
        ([BAD], "OnFailure", "Running"),
        ([RUNS, BAD], "Never", "Running"),
    ],
)
def test_phases(states, policy, expected):
    assert phase(facts(*(container(state, f"c{number}") for number, state in enumerate(states))), policy) == expected


@pytest.mark.parametrize(
    ("first", "policy", "expected"),
    [
        (Waiting(), "Always", "Pending"),
        (BAD, "Never", "Failed"),
        (BAD, "Always", "Pending"),
        (GOOD, "Always", "Running"),
    ],
)
def test_init_containers_come_first(first, policy, expected):
    found = facts(container(first, "first", init=True), container(RUNS))
    assert phase(found, policy) == expected


def test_one_that_waits_for_its_next_start_still_is_a_running_pod():
    found = facts(container(Waiting("CrashLoopBackOff"), last=BAD, restarts=1))
    assert phase(found, "Always") == "Running"


def conditions(made):
    return {each["type"]: each["status"] for each in made["conditions"]}


def test_a_ready_pod():
    ready = container(RUNS, started=True, ready=True, container_id="narthex://1")
    made = status(POD, facts(ready, ips=("10.244.1.2", "fd00::2"), host_ips=("192.0.2.1",), networked=True), NOW)
    assert made["phase"] == "Running"
    assert (made["podIP"], made["podIPs"]) == ("10.244.1.2", [{"ip": "10.244.1.2"}, {"ip": "fd00::2"}])
    assert (made["hostIP"], made["hostIPs"]) == ("192.0.2.1", [{"ip": "192.0.2.1"}])
    assert set(conditions(made).values()) == {"True"}
    (told,) = made["containerStatuses"]
    assert (told["state"], told["ready"], told["started"]) == ({"running": {"startedAt": NOW}}, True, True)


def test_times_of_conditions_move_only_with_them():
    first = status(POD, facts(container(RUNS, ready=False), networked=True), NOW)
    second = status({**POD, "status": first}, facts(container(RUNS, ready=True), networked=True), LATER)
    times = {each["type"]: each["lastTransitionTime"] for each in second["conditions"]}
    assert (times["Ready"], times["ContainersReady"], times["Initialized"]) == (LATER, LATER, NOW)
    assert status({**POD, "status": second}, facts(container(RUNS, ready=True), networked=True), LATER) == second


def test_why_it_is_not_ready():
    made = status(POD, facts(container(RUNS, "a"), container(RUNS, "b"), networked=True), NOW)
    (ready,) = [each for each in made["conditions"] if each["type"] == "Ready"]
    assert (ready["reason"], ready["message"]) == ("ContainersNotReady", "containers with unready status: [a b]")


def test_gates_of_others_count_and_stay():
    pod = {**POD, "spec": {"readinessGates": [{"conditionType": "shop/open"}]}}
    found = facts(container(RUNS, ready=True), networked=True)
    made = status(pod, found, NOW)
    assert conditions(made)["Ready"] == "False" and conditions(made)["ContainersReady"] == "True"
    opened = {"type": "shop/open", "status": "True", "lastTransitionTime": NOW}
    made = status({**pod, "status": {**made, "conditions": [*made["conditions"], opened]}}, found, LATER)
    assert conditions(made)["Ready"] == "True" and opened in made["conditions"]


def test_a_pod_that_is_over():
    pod = {**POD, "spec": {"restartPolicy": "Never"}}
    made = status(pod, facts(container(GOOD, container_id="narthex://1"), networked=True), NOW)
    assert made["phase"] == "Succeeded"
    (ready,) = [each for each in made["conditions"] if each["type"] == "Ready"]
    assert (ready["status"], ready["reason"]) == ("False", "PodCompleted")
    ended = made["containerStatuses"][0]["state"]["terminated"]
    assert ended == {"exitCode": 0, "reason": "Completed", "startedAt": NOW, "finishedAt": LATER}


def test_how_it_ended_before_and_with_a_signal():
    before = replace(BAD, signal=9, container_id="narthex://0")
    made = status(POD, facts(container(Waiting("CrashLoopBackOff", "back-off"), last=before, restarts=2)), NOW)
    (told,) = made["containerStatuses"]
    assert told["state"] == {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}
    assert told["lastState"]["terminated"]["signal"] == 9
    assert (told["restartCount"], told["imageID"]) == (2, "")


def test_what_others_wrote_stays():
    made = status({**POD, "status": {"qosClass": "Burstable", "nominatedNodeName": "x"}}, facts(container(RUNS)), NOW)
    assert (made["qosClass"], made["nominatedNodeName"]) == ("Burstable", "x")


def test_pauses_grow_to_five_minutes():
    assert [back_off(count) for count in range(8)] == [0, 10, 20, 40, 80, 160, 300, 300]
