"""Hours of steps in seconds, with every relation to the timeout kept."""

import pytest

from narthex.testing.pace import LONGEST, pace
from narthex.testing.scenario import parse

HOUR = 3600


def scenario(*steps, timeout=3 * HOUR):
    """A sticky Service, and connections at (seconds, client)."""
    affinity = {"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": timeout}}}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "sticky", "namespace": "shop"},
        "spec": {"clusterIP": "10.110.0.90", "ports": [{"port": 80}], **affinity},
    }
    common = {"to": "10.110.0.90", "port": 80, "proto": "TCP", "pick": "any"}
    doc = {"objects": [service], "steps": [{"at": at, "from": f"10.64.1.{client}", **common} for at, client in steps]}
    return parse(doc, "sticky.yaml", "sticky")


def paced(*steps, timeout=3 * HOUR):
    case = scenario(*steps, timeout=timeout)
    return pace(case, case.steps)


def test_a_visit_within_the_timeout_stays_within_with_a_second_to_spare():
    result = paced((0, 1), (3 * HOUR - 1, 1))
    assert 0 <= result.times[1] - result.times[0] <= result.timeout - 1
    assert [service.affinity_seconds for service in result.scenario.services] == [result.timeout]


@pytest.mark.parametrize("gap", [3 * HOUR, 3 * HOUR + 1, 40 * HOUR])
def test_a_visit_after_the_timeout_comes_a_second_after_it(gap):
    result = paced((0, 1), (gap, 1))
    assert result.times[1] - result.times[0] >= result.timeout + 1
    assert result.times[1] <= LONGEST


def test_renewal_is_put_to_the_test():
    result = paced((0, 1), (2 * HOUR, 1), (4 * HOUR, 1))
    first, second, third = result.times
    assert second - first <= result.timeout - 1 and third - second <= result.timeout - 1
    assert third - first >= result.timeout + 1


def test_clients_do_not_bind_each_other():
    result = paced((0, 1), (9 * HOUR, 2), (9 * HOUR + 1, 3))
    assert result.times == (0.0, 0.0, 0.0)


def test_what_takes_too_long_is_refused():
    with pytest.raises(ValueError, match="cannot be made within 15 s"):
        paced(*((day * 24 * HOUR, 1) for day in range(9)))
