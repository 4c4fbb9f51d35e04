"""Stand-ins for the programs of a control plane: the lab's own API server and controllers behind the official command lines.

python control_plane_stand_in.py NAME ARGUMENTS...
"""

import os
import signal
import sys
import threading
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

PORTS = {"kube-controller-manager": 10257, "kube-scheduler": 10259}


def api_server(given: dict[str, str]) -> None:
    from narthex.kube.messages import prepare_decoders
    from narthex.lab import cluster
    from narthex.lab.api.api import ApiHandler
    from narthex.lab.api.registry import Registry
    from narthex.lab.controllers import node_lifecycle
    from narthex.lab.controllers.controller_manager import lab_controllers
    from narthex.lab.controllers.namespace_objects import root_ca
    from narthex.lab.controllers.service.admission import admission
    from narthex.lab.program.controller_loop import ControllerLoop
    from narthex.lab.program.shared_registry import SharedRegistry
    from narthex.lab.server.certificate import Certificate
    from narthex.lab.server.server import ApiServer

    prepare_decoders()
    # As kube-controller-manager's: the kubelets renew their Leases seldom.
    node_lifecycle._GRACE = timedelta(seconds=float(node_lifecycle.EXTERNAL_NODE_GRACE_SECONDS))
    shared = SharedRegistry(Registry(lambda: datetime.now(UTC), os.urandom, admit=admission()))
    certificate = Path(given["tls-cert-file"]).read_text()
    with shared.held() as registry:
        api = ApiHandler(registry)
        for obj in (
            *map(cluster.namespace, cluster.NAMESPACES),
            cluster.service_cidr(),
            *cluster.api_service(),
            root_ca(cluster.SYSTEM_NAMESPACE, certificate),
        ):
            registry.create(obj["kind"], obj)
    token = Path(given["token-auth-file"]).read_text().partition(",")[0]
    server = ApiServer(api, shared.lock, token=token, changed=shared.notify)
    shared.listen(server.wake)
    server.start()
    made = Certificate(certificate, Path(given["tls-private-key-file"]).read_text())
    server.listen((given["bind-address"], int(given["secure-port"])), made.context())
    threading.Thread(target=ControllerLoop(shared, lab_controllers()).run, daemon=True).start()
    signal.pause()


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()


def healthy(port: int) -> None:
    from narthex.lab.server import certificate

    server = HTTPServer(("127.0.0.1", port), Healthy)
    server.socket = certificate.make(["127.0.0.1"]).context().wrap_socket(server.socket, server_side=True)
    server.serve_forever()


def main(name: str, *words: str) -> None:
    given = dict(word.removeprefix("--").split("=", 1) for word in words)
    print(name, "starts with", *sorted(given), flush=True)
    if name == "etcd":
        signal.pause()
    elif name == "kube-apiserver":
        api_server(given)
    else:
        healthy(PORTS[name])


if __name__ == "__main__":
    main(*sys.argv[1:])
