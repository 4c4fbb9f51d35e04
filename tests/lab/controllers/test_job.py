"""Jobs and CronJobs."""

import pytest

from narthex.lab.api.schedules import last_before, schedule_error, times_after, zone_error
from narthex.lab.controllers.objects import condition, is_pod_active

from .world import START, World, cron_job, job


def active(world):
    return [each for each in world.list("Pod") if is_pod_active(each)]


def end(world, pod, phase="Succeeded"):
    world.set_ready(pod, False, phase=phase)


def status(world, name="work"):
    return world.get("Job", name)["status"]


def conditions(world, name="work"):
    found = status(world, name).get("conditions") or ()
    return {each["type"]: each["reason"] for each in found if each["status"] == "True"}


def test_a_job_completes_once():
    world = World()
    world.put(job())
    (pod,) = active(world)
    assert pod["metadata"]["labels"]["batch.kubernetes.io/job-name"] == "work"
    assert status(world)["active"] == 1
    world.run_pods()
    assert status(world)["ready"] == 1
    end(world, pod)
    assert conditions(world) == {"SuccessCriteriaMet": "CompletionsReached", "Complete": "CompletionsReached"}
    assert (status(world)["succeeded"], status(world).get("active")) == (1, None)
    assert status(world)["completionTime"] and status(world)["uncountedTerminatedPods"] == {}
    assert world.events("Completed") == [("Completed", "Job completed")]
    (pod,) = world.list("Pod")
    assert not pod["metadata"].get("finalizers")


def test_parallel_pods_are_as_many_as_are_missing():
    world = World()
    world.put(job(completions=5, parallelism=2))
    sizes = []
    while active(world):
        sizes.append(len(active(world)))
        end(world, active(world)[0])
    assert sizes == [2, 2, 2, 2, 1]
    assert status(world)["succeeded"] == 5


INDEX = "batch.kubernetes.io/job-completion-index"


def index(pod):
    return int(pod["metadata"]["annotations"][INDEX])


def test_each_index_completes_once():
    world = World()
    world.put(job(completions=7, parallelism=3, completionMode="Indexed"))
    assert sorted(map(index, active(world))) == [0, 1, 2]
    pod = min(active(world), key=index)
    assert pod["metadata"]["name"].startswith("work-0-") and pod["metadata"]["labels"][INDEX] == "0"
    assert pod["spec"]["hostname"] == "work-0"
    (variable,) = pod["spec"]["containers"][0]["env"]
    assert variable["name"] == "JOB_COMPLETION_INDEX" and INDEX in variable["valueFrom"]["fieldRef"]["fieldPath"]
    # An index whose pod fails gets another one, once the delay is over.
    end(world, pod, "Failed")
    world.wait(20)
    assert sorted(map(index, active(world))) == [0, 1, 2]
    seen = []
    while active(world):
        end(world, max(active(world), key=index))
        seen.append(status(world)["completedIndexes"])
    assert seen == ["2", "2,3", "2-4", "2-5", "2-6", "1-6", "0-6"]
    assert (status(world)["succeeded"], status(world)["failed"]) == (7, 1)
    assert "Complete" in conditions(world)


@pytest.mark.parametrize("listed", ["²", "-", "0-", "9" * 5000, "0-" + "9" * 5000, "٣", "x,0"])
def test_a_strange_list_of_completed_indexes_stops_no_controller(listed):
    world = World()
    made = world.put(job(completions=2, parallelism=2, completionMode="Indexed"))
    world.registry.update("Job", {**made, "status": {"completedIndexes": listed}}, subresource="status")
    world.settle()
    while active(world):
        end(world, active(world)[0])
    world.run_pods()
    assert "Complete" in conditions(world)


def test_a_work_queue_ends_with_its_pods():
    world = World()
    world.put(job(parallelism=3))
    assert len(active(world)) == 3
    end(world, active(world)[0])
    assert (len(active(world)), conditions(world)) == (2, {})
    for pod in active(world):
        end(world, pod)
    assert "Complete" in conditions(world)


def test_failures_delay_the_next_pod_until_the_limit():
    world = World()
    world.put(job(backoffLimit=2))
    waits = []
    while active(world):
        (pod,) = active(world)
        end(world, pod, "Failed")
        begin = world.now
        for _ in range(100):
            if active(world) or conditions(world):
                break
            world.wait(1)
        waits.append(round((world.now - begin).total_seconds()))
    assert conditions(world)["Failed"] == "BackoffLimitExceeded"
    assert status(world)["failed"] == 3
    assert waits[-1] == 0
    assert ("BackoffLimitExceeded", "Job has reached the specified backoff limit") in world.events()


def test_a_pod_that_is_deleted_counts_once():
    world = World()
    world.put(job(completions=2))
    end(world, active(world)[0])
    first = next(each for each in world.list("Pod") if not is_pod_active(each))
    world.delete("Pod", first["metadata"]["name"])
    assert (status(world)["succeeded"], len(active(world))) == (1, 1)


def test_a_deadline_ends_a_job():
    world = World()
    world.put(job(activeDeadlineSeconds=30))
    world.run_pods()
    world.wait(29)
    assert (len(active(world)), conditions(world)) == (1, {})
    world.wait(2)
    assert (active(world), conditions(world)) == ([], {"FailureTarget": "DeadlineExceeded"})
    world.run_pods()
    assert conditions(world)["Failed"] == "DeadlineExceeded"


def test_restarts_in_place_count_against_the_limit():
    world = World()
    world.put(job(restart="OnFailure", backoffLimit=2))
    world.run_pods()
    for restarts, failed in ((1, False), (2, True)):
        held = world.get("Pod", active(world)[0]["metadata"]["name"])
        statuses = [{"name": "web", "restartCount": restarts, "state": {"running": {}}}]
        changed = {**held, "status": {**held["status"], "containerStatuses": statuses}}
        world.registry.update("Pod", changed, subresource="status")
        world.settle()
        assert ("FailureTarget" in conditions(world)) == failed


def test_a_finished_job_lives_for_its_time():
    world = World()
    world.put(job(ttlSecondsAfterFinished=60))
    end(world, active(world)[0])
    world.wait(59)
    assert world.get("Job", "work") is not None
    world.wait(2)
    assert world.get("Job", "work") is None
    assert world.list("Pod") == []


def test_a_suspended_job_has_no_pods():
    world = World()
    world.put(job(suspend=True))
    assert (active(world), conditions(world)) == ([], {"Suspended": "JobSuspended"})
    assert "startTime" not in status(world)
    world.patch("Job", "work", suspend=False)
    assert len(active(world)) == 1
    assert condition(world.get("Job", "work"), "Suspended")["status"] == "False"


def test_a_deleted_job_takes_its_pods_along():
    world = World()
    world.put(job(parallelism=2, completions=2))
    end(world, active(world)[0])
    world.run_pods()
    world.delete("Job", "work")
    world.converge()
    assert world.list("Pod") == []


# CronJobs.


def jobs(world):
    return [each["metadata"]["name"] for each in world.list("Job")]


def finish(world):
    for pod in active(world):
        end(world, pod)


def test_jobs_are_created_on_time_and_pruned():
    world = World()
    world.put(cron_job())
    assert jobs(world) == []
    world.wait(299)
    assert jobs(world) == []
    world.wait(1)
    assert jobs(world) == [f"tick-{int(world.now.timestamp()) // 60}"]
    assert len(world.get("CronJob", "tick")["status"]["active"]) == 1
    for _ in range(5):
        finish(world)
        world.wait(300)
    finish(world)
    assert len(jobs(world)) == 3
    held = world.get("CronJob", "tick")["status"]
    assert "active" not in held and held["lastSuccessfulTime"] == held["lastScheduleTime"]
    assert len(world.events("SawCompletedJob")) == 6


@pytest.mark.parametrize(("policy", "running"), [("Allow", 3), ("Forbid", 1), ("Replace", 1)])
def test_what_happens_while_a_job_runs(policy, running):
    world = World()
    world.put(cron_job(concurrencyPolicy=policy))
    for _ in range(3):
        world.wait(300)
        world.run_pods()
    assert len(jobs(world)) == running
    assert bool(world.events("JobAlreadyActive")) == (policy == "Forbid")
    assert len(world.events("SuccessfulCreate")) >= (1 if policy == "Forbid" else 3)


def test_a_suspended_schedule_rests_and_a_late_job_starts_only_before_its_deadline():
    world = World()
    world.put(cron_job(suspend=True, startingDeadlineSeconds=60))
    world.wait(400)
    assert jobs(world) == []
    world.patch("CronJob", "tick", suspend=False)
    assert jobs(world) == []
    assert len(world.events("MissSchedule")) == 1
    world.wait(300)
    assert len(jobs(world)) == 1


@pytest.mark.parametrize(
    ("schedule", "zone", "expected"),
    [
        ("*/5 * * * *", "", ["00:05", "00:10"]),
        ("0 */2 * * *", "", ["02:00", "04:00"]),
        ("@hourly", "", ["01:00", "02:00"]),
        ("@every 90m", "", ["01:30", "03:00"]),
        ("30 3 ? * *", "", ["03:30", "03:30"]),
        ("0 12 * * MON-FRI", "Europe/Berlin", ["11:00", "11:00"]),
        ("0 12 * * *", "Asia/Kolkata", ["06:30", "06:30"]),
    ],
)
def test_times_of_a_schedule(schedule, zone, expected):
    times = times_after(schedule, zone, START)
    found = [next(times) for _ in expected]
    assert [each.strftime("%H:%M") for each in found] == expected
    assert last_before(schedule, zone, START, found[1]) == found[1]
    assert last_before(schedule, zone, START, found[0]) == found[0]
    assert last_before(schedule, zone, found[0], found[0]) is None


@pytest.mark.parametrize(
    ("schedule", "wrong"),
    [
        ("0 0 * * *", ""),
        ("@daily", ""),
        ("* * * *", "expected exactly 5 fields, found 4: [* * * *]"),
        ("@often", "unrecognized descriptor: @often"),
        ("61 * * * *", "Bad minute"),
    ],
)
def test_what_is_wrong_with_a_schedule(schedule, wrong):
    assert schedule_error(schedule) == wrong


@pytest.mark.parametrize(
    ("zone", "wrong"), [("Europe/Berlin", False), ("UTC", False), ("../x", True), ("Nowhere", True)]
)
def test_what_is_wrong_with_a_time_zone(zone, wrong):
    assert bool(zone_error(zone)) == wrong
