"""The programs of an external control plane, and the kubelets' API that its API server uses."""

import pytest

from narthex.lab.api.errors import StatusError
from narthex.lab.api.requests import ApiRequest, ExecRequest, LogRequest, PortForwardRequest
from narthex.lab.program.control_plane import PROGRAMS, check_programs
from narthex.lab.program.state import LabError
from narthex.lab.server.kubelet_api import kubelet_request


def test_each_missing_program_is_named(tmp_path):
    with pytest.raises(LabError, match="there is no directory"):
        check_programs(tmp_path / "none")
    for name in PROGRAMS:
        with pytest.raises(LabError) as refused:
            check_programs(tmp_path)
        said = str(refused.value).partition(":")[0]
        missing = [each for each in PROGRAMS if not (tmp_path / each).exists()]
        assert said == f"{tmp_path} has no executable {', '.join(missing)}"
        (tmp_path / name).write_text("#!/bin/sh\n")
        with pytest.raises(LabError, match=name):
            # It cannot be executed.
            check_programs(tmp_path)
        (tmp_path / name).chmod(0o755)
    check_programs(tmp_path)


def request(path, *pairs):
    return ApiRequest("POST", path, dict(pairs), {}, b"", pairs)


@pytest.mark.parametrize(
    ("path", "pairs", "meant"),
    [
        (
            "/containerLogs/shop/web/c",
            (("tailLines", "5"), ("follow", "true"), ("sinceSeconds", "10")),
            LogRequest(namespace="shop", pod="web", container="c", tail=5, follow=True, since=90.0),
        ),
        (
            "/exec/shop/web/c",
            (("command", "ls"), ("command", "-l"), ("input", "1"), ("output", "1"), ("error", "1")),
            ExecRequest(namespace="shop", pod="web", container="c", argv=("ls", "-l"), stdin=True),
        ),
        (
            "/exec/shop/web/c",
            (("command", "sh"), ("output", "1"), ("error", "1"), ("tty", "1")),
            ExecRequest(namespace="shop", pod="web", container="c", argv=("sh",), stderr=False, tty=True),
        ),
        (
            "/attach/shop/web/c",
            (("input", "1"),),
            ExecRequest(namespace="shop", pod="web", container="c", argv=(), stdin=True, stdout=False, stderr=False),
        ),
        ("/portForward/shop/web", (), PortForwardRequest(namespace="shop", pod="web")),
    ],
)
def test_what_the_api_server_asks_a_kubelet_for(path, pairs, meant):
    assert kubelet_request(request(path, *pairs), lambda: 100.0) == meant


@pytest.mark.parametrize("path", ["/", "/pods", "/exec/shop/web", "/containerLogs/shop", "/run/shop/web/c"])
def test_what_a_kubelet_does_not_have(path):
    with pytest.raises(StatusError) as refused:
        kubelet_request(request(path, ("command", "x")), lambda: 0.0)
    assert refused.value.code == 404
