"""Steps are followed through every history that chance allows."""

import yaml

from narthex.testing import witnesses
from narthex.testing.scenario import parse

STICKY = """
node: {name: worker-a, ips: [10.20.0.11], config: {clusterCIDR: 10.64.0.0/12}}
objects:
- apiVersion: v1
  kind: Service
  metadata: {name: sticky, namespace: shop}
  spec: {clusterIP: 10.110.0.90, ports: [{port: 80}], sessionAffinity: %s}
- apiVersion: discovery.k8s.io/v1
  kind: EndpointSlice
  metadata: {name: sticky-1, namespace: shop, labels: {kubernetes.io/service-name: sticky}}
  addressType: IPv4
  ports: [{name: '', protocol: TCP, port: 80}]
  endpoints: [{addresses: [10.64.1.10]}, {addresses: [10.64.2.10]}]
"""


def findings(affinity, *steps, against):
    """What a witness says of steps (at, pick)."""
    doc = yaml.safe_load(STICKY % affinity)
    common = {"from": "10.64.1.200", "to": "10.110.0.90", "port": 80, "proto": "TCP"}
    doc["steps"] = [{"at": at, "pick": pick, **common} for at, pick in steps]
    return witnesses.testify(parse(doc, "sticky.yaml", "sticky"), "nftables", against, ())


def test_affinity_holds_in_every_history():
    for against in ("plan", "rules"):
        said = findings("ClientIP", (0, "any"), (10, "same-as-0"), (10800, "same-as-0"), against=against)
        assert [finding.ok for finding in said] == [True, True, True]
        assert [finding.label for finding in said] == ["step 0", "step 1", "step 2"]
        assert said[0].got == {"dnat": ["10.64.1.10:80", "10.64.2.10:80"]}


def test_luck_is_not_affinity():
    for against in ("plan", "rules"):
        expired = findings("ClientIP", (0, "any"), (10801, "same-as-0"), against=against)
        assert [finding.ok for finding in expired] == [True, False]
        without = findings("None", (0, "any"), (1, "same-as-0"), against=against)
        assert [finding.ok for finding in without] == [True, False]


def test_to_differ_has_to_be_certain_too():
    for affinity in ("ClientIP", "None"):
        said = findings(affinity, (0, "any"), (1, "differs-from-0"), against="plan")
        assert [finding.ok for finding in said] == [True, False]
