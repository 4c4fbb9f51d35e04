"""Container images that a test writes itself: archives in the layout of the Open Container Initiative."""

import gzip
import hashlib
import io
import json
import struct
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
"""Architectures of images, by the machine's name of its own."""
_MACHINES = {
    # The number of the architecture in ELF files, and code that waits for ever: `pause` in a loop, and `ppoll` of no files.
    "amd64": (62, bytes.fromhex("b822000000 0f05 ebf7")),
    "arm64": (183, struct.pack("<7I", 0xD2800000, 0xD2800001, 0xD2800002, 0xD2800003, 0xD2800928, 0xD4000001, 0x17FFFFFA)),
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
