"""Container images that a test writes itself: archives in the layout of the Open Container Initiative."""

import gzip
import hashlib
import io
import json
import shutil
import struct
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from narthex.lab.server import certificate
from narthex.linux.run import run

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
"""Architectures of images, by the machine's name of its own."""
_MACHINES = {
    # The number of the architecture in ELF files, and code that waits for ever: `pause` in a loop, and `ppoll` of no files.
    "amd64": (62, bytes.fromhex("b822000000 0f05 ebf7")),
    "arm64": (
        183,
        struct.pack("<7I", 0xD2800000, 0xD2800001, 0xD2800002, 0xD2800003, 0xD2800928, 0xD4000001, 0x17FFFFFA),
    ),
}
_LOAD = 0x400000
_HEADERS = 64 + 56


def pause_program(architecture: str) -> bytes:
    """Return a program that waits until it is killed: the first process of each pod."""
    machine, code = _MACHINES[architecture]
    size = _HEADERS + len(code)
    start = _LOAD + _HEADERS
    header = b"\x7fELF\x02\x01\x01" + bytes(9)
    header += struct.pack("<HHIQQQIHHHHHH", 2, machine, 1, start, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, _LOAD, _LOAD, size, size, 0x1000)
    return header + segment + code


def layer(files: Mapping[str, bytes], folders: Iterable[tuple[Path, str]] = ()) -> bytes:
    """Return a layer: programs with their contents, and copies of folders as (source, name in the image)."""
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o755
            archive.addfile(entry, io.BytesIO(data))
        for source, name in folders:
            archive.add(source, name)
    return memory.getvalue()


def write_image(path: Path, names: Sequence[str], layers: Sequence[bytes], architecture: str, **config: Any) -> None:
    """Write an archive that `ctr images import` reads. `config` has keys such as Entrypoint, Cmd, and Env."""
    blobs = {}

    def blob(data: bytes, kind: str) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = data
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(data)}

    description = {
        "architecture": architecture,
        "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(each).hexdigest()}" for each in layers]},
    }
    packed = [gzip.compress(each, 1, mtime=0) for each in layers]
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": blob(json.dumps(description).encode(), "config.v1+json"),
        "layers": [blob(each, "layer.v1.tar+gzip") for each in packed],
    }
    made = blob(json.dumps(manifest).encode(), "manifest.v1+json")
    index = [{**made, "annotations": {"io.containerd.image.name": name}} for name in names]
    blobs["index.json"] = json.dumps({"schemaVersion": 2, "manifests": index}).encode()
    blobs["oci-layout"] = b'{"imageLayoutVersion": "1.0.0"}'
    with tarfile.open(path, "w") as archive:
        for name, data in blobs.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o644
            archive.addfile(entry, io.BytesIO(data))


NARTHEX = "narthex.example/narthex:0.1.0"
"""The image of this project."""
CACHE = Path(__file__).parents[2] / "build" / "cluster"
"""Debian's base system, which takes a minute to fetch, is kept here."""
_SUITE = "bookworm"
_BASE = "narthex.example/base:1"
_BUILD_SECONDS = 1800.0


class ImageBuilder:
    """Builds images with podman, without a registry: from a base system of Debian's packages. Its storage is a directory of its own."""

    def __init__(self, directory: Path, options: Sequence[str]) -> None:
        """Build in a directory. `options` are further ones of `podman build`."""
        # Its mounts go with the namespace.
        self._podman = [
            "unshare",
            "--mount",
            "podman",
            f"--root={directory}/podman",
            f"--runroot={directory}/podman-run",
        ]
        self._directory = directory
        self._options = options

    def build(self, name: str, containerfile: Path, context: Path) -> Path:
        """Build an image and return its archive. Raises CommandError."""
        self._import_base()
        words = ["build", "--network=host", "--isolation=chroot", f"--build-arg=BASE={_BASE}", *self._options]
        self._run([*words, "-f", str(containerfile), "-t", name, str(context)])
        archive = self._directory / f"{name.rpartition('/')[2].replace(':', '-')}.tar"
        self._run(["save", "--format=oci-archive", "-o", str(archive), name])
        return archive

    def load(self, archive: Path) -> None:
        """Take over an image, so that another one can be built from it. Raises CommandError."""
        self._run(["load", "-i", str(archive)])

    def _import_base(self) -> None:
        listed = self._run(["images", "--format={{.Repository}}:{{.Tag}}"])
        if _BASE in listed:
            return
        base = CACHE / "base.tar"
        if not base.exists():
            system = self._directory / "base"
            run(
                ["debootstrap", "--variant=minbase", "--include=ca-certificates", _SUITE, str(system)],
                timeout=_BUILD_SECONDS,
            )
            authorities = Path("/etc/ssl/certs/ca-certificates.crt")
            if authorities.exists():
                # A machine whose packages come through a proxy of its own knows it by this file.
                shutil.copy(authorities, system / "etc" / "ssl" / "certs")
            for folder in (
                "var/cache/apt/archives",
                "var/lib/apt/lists",
                "usr/share/doc",
                "usr/share/man",
                "usr/share/locale",
            ):
                shutil.rmtree(system / folder)
                (system / folder).mkdir()
            CACHE.mkdir(parents=True, exist_ok=True)
            unfinished = base.with_suffix(".part")
            run(["tar", "-C", str(system), "-cf", str(unfinished), "."], timeout=_BUILD_SECONDS)
            unfinished.rename(base)
        self._run(["import", str(base), _BASE])

    def _run(self, words: Sequence[str]) -> str:
        return run([*self._podman, *words], timeout=_BUILD_SECONDS)


def write_suite_context(agnhost: Path, context: Path) -> Path:
    """Fill a directory with what the image of the suite's pods is built from, and return its Containerfile."""
    context.mkdir()
    shutil.copy(agnhost, context / "agnhost")
    (context / "agnhost").chmod(0o755)
    (context / "coredns").write_text('#!/bin/sh\nexec /opt/narthex/bin/narthex dns "$@"\n')
    (context / "coredns").chmod(0o755)
    # The program serves HTTPS with these.
    pair = certificate.make(["localhost", "127.0.0.1", "::1"])
    (context / "localhost.crt").write_text(pair.certificate)
    (context / "localhost.key").write_text(pair.key)
    containerfile = context / "Containerfile"
    containerfile.write_text(SUITE_PROGRAMS)
    return containerfile


SUITE_PROGRAMS = f"""\
FROM {NARTHEX}
RUN apt-get update && apt-get install -y --no-install-recommends curl wget bind9-dnsutils netcat-openbsd && rm -rf /var/lib/apt/lists/*
RUN echo 'tries = 1' >> /etc/wgetrc
COPY agnhost coredns localhost.crt localhost.key /
ENTRYPOINT ["/agnhost"]
CMD ["pause"]
"""
"""The image of the pods of Kubernetes' end-to-end suite: its program, and others that tests start. Its DNS server is Narthex's.

wget tries once, as that of busybox does: otherwise a test that expects no answer waits for minutes.
"""
