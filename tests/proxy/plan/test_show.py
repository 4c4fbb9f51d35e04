"""The plan as a table and as data."""

import msgspec

from narthex.model import visible
from narthex.model.net import IPFamily, Protocol
from narthex.model.objects import ServiceCIDR, ServicePort
from narthex.proxy.plan.document import plan_record
from narthex.proxy.plan.ir import Endpoint, Plan, Pool
from narthex.proxy.plan.show import decision_text, match_text, table
from narthex.testing.build import endpoint, endpoint_slice, plan, service

SHOP = (
    service(
        "shop/web",
        "10.110.0.5",
        type="LoadBalancer",
        node_port=30001,
        balancers=("203.0.113.10",),
        source_ranges=("198.51.100.0/24",),
        external_policy_local=True,
        affinity_seconds=10800,
    ),
    endpoint_slice("shop/web", endpoint("10.64.1.10"), endpoint("10.64.2.10", node="worker-b"), port=8080),
    service("shop/empty", "10.110.0.6", ports=(ServicePort(port=53, protocol=Protocol.UDP),)),
    service("shop/wide", "10.110.0.7"),
    endpoint_slice("shop/wide", *(endpoint(f"10.64.2.{number}", node="worker-b") for number in range(1, 8))),
    service("shop/zz", "10.110.0.5"),
    ServiceCIDR(name="kubernetes", cidrs=("10.110.0.0/16",)),
)


def test_table(golden) -> None:
    golden("plan/shop.txt", table(plan(*SHOP)))


def test_table_of_all_endpoints() -> None:
    text = table(plan(*SHOP), all_endpoints=True)
    assert "10.64.2.7:80" in text
    assert "more" not in text


def test_table_does_not_depend_on_the_order_of_arrival() -> None:
    assert table(plan(*reversed(SHOP))) == table(plan(*SHOP))


def test_empty_plan() -> None:
    assert table(Plan(family=IPFamily.IPV6, services={})).splitlines() == [
        "node (no name), IPv6: 0 service ports, 0 frontends",
        "pods: not distinguished from others (detection is off)",
        "node ports: on every address of the node",
        "service CIDRs: none known",
    ]


def test_detection_by_interface() -> None:
    by_bridge = plan(
        detect_local_mode="BridgeInterface", bridge_interface="cni0", node_port_addresses=("172.16.0.0/12",)
    )
    assert table(by_bridge).splitlines()[1:3] == [
        "pods: what comes in on cni0",
        "node ports: on the node's addresses in 172.16.0.0/12",
    ]
    by_prefix = plan(detect_local_mode="InterfaceNamePrefix", interface_name_prefix="veth", localhost_node_ports=True)
    assert "pods: what comes in on veth*" in table(by_prefix)


def test_columns_line_up() -> None:
    lines = table(plan(*SHOP)).splitlines()
    head = next(line for line in lines if line.startswith("SERVICE PORT"))
    for line in lines[lines.index(head) + 1 :]:
        if line.startswith(("shop/", " ")):
            assert line[head.index("FRONTEND") - 1] == " "


def test_data_holds_the_same(golden) -> None:
    data = msgspec.json.decode(msgspec.json.encode(plan_record(plan(*SHOP))))
    golden("plan/shop.json", msgspec.json.format(msgspec.json.encode(data), indent=1).decode() + "\n")
    web = next(each for each in data["services"] if each["name"] == "web")
    assert web["frontends"][1]["allowFrom"] == ["198.51.100.0/24"]
    assert web["local"]["endpoints"] == [{"address": "10.64.1.10", "port": 8080, "local": True}]


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert visible("ready\x1b[31m") == "ready\N{REPLACEMENT CHARACTER}[31m"
    pool = Pool(endpoints=(Endpoint("10.64.1.1", 80),), reason="\x1b]0;title\x07")
    shown = plan(*SHOP)
    name, held = next((name, held) for name, held in shown.services.items() if held.cluster)
    hostile = msgspec.structs.replace(shown, services={name: msgspec.structs.replace(held, cluster=pool)})
    assert "\x1b" not in table(hostile)


def test_texts() -> None:
    frontend = next(iter(plan(*SHOP).services.values())).frontends[0]
    assert decision_text(frontend.pod) in ("cluster", "reject")
    assert match_text((None, Protocol.UDP, 30053)) == "node port 30053/UDP"
    assert match_text(("fd00::1", Protocol.TCP, 80)) == "[fd00::1]:80/TCP"


def test_health_checks_are_shown():
    balanced = service(
        "shop/web", "10.110.0.5", type="LoadBalancer", external_policy_local=True, health_check_node_port=32080
    )
    assert "health check shop/web: port 32080 answers 503, 0 ready endpoints on this node" in table(plan(balanced))
