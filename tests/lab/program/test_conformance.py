"""Kubernetes' end-to-end suite in a lab: which tests are handed out, and how their reports are read."""

import json
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from narthex.cli import main
from narthex.lab.conformance import CaseReport, choose, first_line
from narthex.lab.program.conformance import image, netcat
from narthex.lab.program.conformance.coordinator import Coordinator
from narthex.lab.program.conformance.suite import Suite
from narthex.runtime.http import HttpRequest


def case(name, state="passed", *labels):
    return {"LeafNodeType": "It", "LeafNodeText": name, "LeafNodeLabels": list(labels), "State": state}


DRY_RUN = [
    {"LeafNodeType": "ReportBeforeSuite", "State": "passed"},
    case("a", "skipped"),
    case("b"),
    case("s", "passed", "Serial"),
    case("c", "skipped"),
    case("d"),
]


@pytest.fixture
def coordinator():
    made = Coordinator(choose(json.dumps([{"SpecReports": DRY_RUN}]).encode()), 2)
    yield made
    made.close()


def ask(coordinator, method, path, body=None):
    response = coordinator.answer(HttpRequest(method, path, body=json.dumps(body).encode()))
    return response.status, json.loads(response.body)


def test_only_chosen_tests_are_handed_out(coordinator):
    positions = [ask(coordinator, "GET", "/counter")[1]["Index"] for _ in range(3)]
    assert positions[:2] == [1, 3]
    assert positions[2] > 1_000_000


def test_long_tests_begin_first():
    cases = [case("a [Slow]", "skipped"), case("b"), case("c [Slow]"), case("HostPort d")]
    assert list(choose(json.dumps([{"SpecReports": cases}]).encode()).by_position) == [2, 3, 1]


def test_if_the_order_is_another_one_all_are_handed_out(coordinator):
    assert ask(coordinator, "GET", "/counter")[1]["Index"] == 1
    ask(coordinator, "POST", "/did-run", case("a", "skipped"))
    assert [ask(coordinator, "GET", "/counter")[1]["Index"] for _ in range(3)] == [0, 2, 3]


def test_the_first_process_waits_for_the_others_and_they_for_it(coordinator):
    assert ask(coordinator, "GET", "/before-suite-state")[0] == 425
    ask(coordinator, "POST", "/before-suite-completed", {"Data": "eA==", "State": "passed"})
    assert ask(coordinator, "GET", "/before-suite-state") == (200, {"Data": "eA==", "State": "passed"})
    assert ask(coordinator, "GET", "/have-nonprimary-procs-finished")[0] == 425
    coordinator.ended(2)
    assert ask(coordinator, "GET", "/have-nonprimary-procs-finished")[0] == 200
    coordinator.ended(1)
    assert ask(coordinator, "GET", "/report-before-suite-state")[0] == 410


def test_reports_of_chosen_tests_and_of_failed_steps_are_kept(coordinator):
    passed_step = {"LeafNodeType": "SynchronizedBeforeSuite", "State": "passed"}
    for each in (case("b"), passed_step, {**passed_step, "State": "timedout"}, case("x", "skipped")):
        ask(coordinator, "POST", "/did-run", each)
    kept = [coordinator.reports.get_nowait() for _ in range(2)]
    assert [(each.name, each.state) for each in kept] == [("b", "passed"), ("", "timedout")]
    assert isinstance(kept[0], CaseReport) and coordinator.reports.empty()


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("", ""),
        ("\n  it broke\nat x", "it broke"),
        ("Unexpected error:\n    <*errors.errorString>: \n", "Unexpected error: <*errors.errorString>:"),
    ],
)
def test_the_line_that_tells_why(message, line):
    assert first_line(message) == line


def test_a_program_that_is_not_the_suite(tmp_path):
    for name in ("e2e.test", "agnhost"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 3\n")
    words = ["lab", "conformance", "--e2e", str(tmp_path / "e2e.test"), "--agnhost", str(tmp_path / "agnhost")]
    done = CliRunner().invoke(main, words)
    assert (done.exit_code, "is not executable" in done.output) == (2, True)
    for name in ("e2e.test", "agnhost"):
        (tmp_path / name).chmod(0o755)
    done = CliRunner().invoke(main, words)
    assert (done.exit_code, "is not Kubernetes' e2e.test" in done.output) == (2, True)
    assert CliRunner().invoke(main, [*words, "--focus", "("]).exit_code == 2


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_the_netcat_of_the_image(kind):
    with socket.socket(socket.AF_INET, kind) as server:
        server.bind(("127.0.0.1", 0))
        if kind == socket.SOCK_STREAM:
            server.listen()

        def serve():
            if kind == socket.SOCK_STREAM:
                client, _ = server.accept()
                with client:
                    client.sendall(b"you said " + client.recv(100))
            else:
                data, peer = server.recvfrom(100)
                server.sendto(b"you said " + data, peer)

        threading.Thread(target=serve, daemon=True).start()
        flags = ["-v", "-u", "-w", "0.5"] if kind == socket.SOCK_DGRAM else ["-v", "-t", "-w", "60"]
        done = subprocess.run(
            [sys.executable, "-IS", netcat.__file__, *flags, "127.0.0.1", str(server.getsockname()[1])],
            input="hello", capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
    assert done.stdout == "you said hello"
    assert "succeeded!" in done.stderr


def test_no_process_reads_a_file_that_is_being_written_for_another_one(tmp_path):
    program = tmp_path / "e2e.test"
    program.write_text('#!/bin/sh\necho "$KUBE_TEST_REPO_LIST"\n')
    program.chmod(0o755)
    suite = Suite(program, tmp_path, "all", "")
    for number in (1, 2):
        started = suite.start(number, 2, "http://127.0.0.1:1", tmp_path / "kubeconfig", 3, None)
        assert started.wait(60) == 0
    files = [suite.last_words(number).strip() for number in (1, 2)]
    assert len(set(files)) == 2
    assert [json.loads(Path(file).read_text()) for file in files] == [image.REGISTRIES] * 2


def test_the_image_has_a_dns_server_that_reads_a_corefile(tmp_path, monkeypatch):
    agnhost = tmp_path / "agnhost"
    agnhost.write_text("#!/bin/sh\n")
    (tmp_path / "Corefile").write_text(". {\n    hosts {\n        192.0.2.1 a.example\n    }\n    log\n}\n")
    monkeypatch.setattr(image, "is_private", lambda _: False)
    monkeypatch.setattr(image, "_python_of_pods", lambda: sys.executable)
    image.make_image(tmp_path / "image", agnhost)
    server = str(tmp_path / "image" / "coredns")
    run = subprocess.run([server, "-conf", str(tmp_path / "Corefile"), "--check"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    monkeypatch.setattr(image, "_python_of_pods", lambda: "/bin/false")
    image.make_image(tmp_path / "other", agnhost)
    assert not (tmp_path / "other" / "coredns").exists()
