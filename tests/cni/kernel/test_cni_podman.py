"""Debian's podman, as it is, with our plugins: two containers that reach each other, and a published port."""

import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import time
import urllib.request
from pathlib import Path

import pytest
from tests.cni.kernel.cni_place import Place

from narthex.cni.program.install import install
from narthex.linux.namespaces import in_namespace

pytestmark = pytest.mark.kernel
BUSYBOX = "/bin/busybox"


def root_file_system(directory):
    """An archive with busybox, the smallest system there is."""
    archive = directory / "root.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(shutil.which("busybox") or BUSYBOX, "bin/busybox")
        page = directory / "index.html"
        page.write_text("hello from one\n")
        tar.add(page, "www/index.html")
    return archive


class Podman:
    """podman with all its folders in one place, in a network namespace. It must not look at the machine's own."""

    def __init__(self, scratch, namespace):
        self.scratch, self.namespace = scratch, namespace
        install(
            scratch / "bin",
            scratch / "conf",
            socket=str(scratch / "sock"),
            state=str(scratch / "state"),
            subnets=("10.93.0.0/24",),
        )
        conflist = next((scratch / "conf").iterdir())
        config = json.loads(conflist.read_text())
        config["plugins"][0]["ipam"]["dataDir"] = str(scratch / "networks")
        conflist.write_text(json.dumps(config))
        (scratch / "containers.conf").write_text(
            f'[network]\nnetwork_backend = "cni"\ncni_plugin_dirs = ["{scratch}/bin"]\n'
            f'network_config_dir = "{scratch}/conf"\n'
            '[engine]\nevents_logger = "none"\ncgroup_manager = "cgroupfs"\nruntime = "runc"\nlock_type = "file"\n'
            '[containers]\nlog_driver = "k8s-file"\ndefault_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]\n'
        )

    def __call__(self, *arguments):
        folders = {"root": "storage", "runroot": "run", "tmpdir": "tmp"}
        options = [f"--{name}={self.scratch}/{folder}" for name, folder in folders.items()]
        environment = {**os.environ, "CONTAINERS_CONF": str(self.scratch / "containers.conf")}
        with in_namespace(self.namespace):
            done = subprocess.run(
                ["podman", *options, "--storage-driver=vfs", *arguments],
                env=environment,
                capture_output=True,
                text=True,
                timeout=120,
            )
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
        return done.stdout.strip()


def fetched(namespace, url):
    """What a web server answers, once it does."""
    end = time.monotonic() + 60
    while True:
        try:
            with in_namespace(namespace):
                return urllib.request.urlopen(url, timeout=30).read().decode()
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def test_two_containers_and_a_published_port():
    # podman takes no longer paths than fifty characters.
    with tempfile.TemporaryDirectory(prefix="nx", dir="/tmp") as short, Place(Path(short)) as place:
        podman = Podman(place.scratch, place.name)
        podman("import", str(root_file_system(place.scratch)), "narthex-cni-test")
        run = ("run", "-d", "--network", "narthex")
        try:
            podman(
                *run,
                "--name",
                "one",
                "-p",
                "8080:80",
                "narthex-cni-test",
                BUSYBOX,
                "httpd",
                "-f",
                "-p",
                "80",
                "-h",
                "/www",
            )
            podman(*run, "--name", "two", "narthex-cni-test", BUSYBOX, "sleep", "1000")
            assert fetched(place.name, "http://127.0.0.1:8080/") == "hello from one\n"
            assert fetched(place.outside, "http://192.0.2.1:8080/") == "hello from one\n"
            address = podman("inspect", "one", "--format", "{{.NetworkSettings.Networks.narthex.IPAddress}}")
            assert address == "10.93.0.2"
            said = podman("exec", "two", BUSYBOX, "wget", "-qO-", f"http://{address}/")
            assert said == "hello from one"
        finally:
            podman("rm", "-f", "-t", "0", "--all")
        place.nothing_left()
        assert place.links() == ["cni0"]
