"""Build the archives of the plugin `kubectl narthex`, and the manifest by which Krew installs them.

    python scripts/krew.py WHEEL URL [--into FOLDER] [--platform linux/amd64 ...] [--python 3.12 ...]

URL is the folder on the web with the archives of this release. `make release-check` runs this and tries the archive of its own platform.

An archive has Narthex, the packages that the plugin imports, for each supported version of Python, and a launcher: a Python is not in
it. Packages with compiled modules make archives differ between platforms.
"""

from __future__ import annotations

import argparse
import filecmp
import gzip
import hashlib
import io
import platform as platform_of
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
NAME = "kubectl-narthex"
PLATFORMS = {"linux/amd64": "manylinux2014_x86_64", "linux/arm64": "manylinux2014_aarch64"}
"""By `OS/ARCHITECTURE` as Krew names them, the platform of Python's packages."""
PYTHONS = ("3.11", "3.12", "3.13")
"""Versions for which all needed packages are published as binaries: immutables 0.21 is not, for 3.14."""
NEEDED = ("click", "msgspec", "immutables", "PyYAML")
"""Packages of others that the plugin imports."""
SHARED = "any"
"""The folder with packages that are the same for all versions of Python."""
LAUNCHER = """#!/bin/sh
# Runs kubectl narthex with a Python for which this archive has packages.
here=$(dirname "$(readlink -f "$0")")
for python in python3 python3.13 python3.12 python3.11; do
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2> /dev/null) || continue
    [ -d "$here/lib/$version" ] || continue
    exec "$python" -I -c 'import sys
sys.path[:0] = [sys.argv.pop(1), sys.argv.pop(1)]
from narthex.cli.kubectl import main
main(prog_name="kubectl narthex")' "$here/lib/$version" "$here/lib/any" "$@"
done
echo "kubectl narthex: no Python for it is on the PATH; it needs one of: $(cd "$here/lib" && echo [0-9]*)" >&2
exit 1
"""


def install(wheel: Path, platform: str, python: str, into: Path) -> None:
    """Install the wheel and the needed packages for a platform and a Python into a folder. Raises CalledProcessError."""
    options = ["--platform", PLATFORMS[platform], "--python-version", python, "--only-binary=:all:", "--no-deps"]
    options += ["--quiet", "--disable-pip-version-check", "--no-compile", "--target", str(into)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(wheel), *NEEDED], check=True)


def archive(path: Path, sites: Mapping[str, Path]) -> None:
    """Write an archive. `sites` are folders with installed packages, by version of Python."""
    first = next(iter(sites.values()))
    shared = {
        entry.name
        for entry in first.iterdir()
        if all(_same(entry, site / entry.name) for site in sites.values()) and entry.name != "bin"
    }
    with (
        path.open("wb") as raw,
        gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as stream,
        tarfile.open(fileobj=stream, mode="w") as tar,
    ):
        _add(tar, NAME, LAUNCHER.encode(), 0o755)
        _add(tar, "LICENSE", (ROOT / "LICENSE").read_bytes())
        for version, site in sites.items():
            for file in _files(site):
                top = file.relative_to(site).parts[0]
                folder = SHARED if top in shared else version
                if top != "bin" and (folder != SHARED or site is first):
                    _add(tar, f"lib/{folder}/{file.relative_to(site).as_posix()}", file.read_bytes())
            # A launcher finds a version by its folder, also if all packages are shared.
            _add(tar, f"lib/{version}/.python", b"")


def _same(one: Path, other: Path) -> bool:
    if one.is_file():
        return other.is_file() and filecmp.cmp(one, other, shallow=False)
    names = [file.relative_to(one) for file in _files(one)]
    return names == [file.relative_to(other) for file in _files(other)] and all(
        filecmp.cmp(one / name, other / name, shallow=False) for name in names
    )


def _files(folder: Path) -> Iterator[Path]:
    yield from sorted(file for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts)


def _add(tar: tarfile.TarFile, name: str, data: bytes, mode: int = 0o644) -> None:
    """Add a file. Times and owners are always the same, so that equal contents have equal checksums."""
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(data), mode
    tar.addfile(member, io.BytesIO(data))


def archive_name(platform: str) -> str:
    """Return the file name of a platform's archive."""
    return f"{NAME}_{platform.replace('/', '_')}.tar.gz"


def manifest(version: str, url: str, archives: Mapping[str, Path], pythons: Sequence[str] = PYTHONS) -> str:
    """Return Krew's manifest of a release. `archives` are files by platform; their names are below `url` on the web."""
    platforms = []
    for platform, path in archives.items():
        os, _, arch = platform.partition("/")
        platforms.append(
            {
                "selector": {"matchLabels": {"os": os, "arch": arch}},
                "uri": f"{url.rstrip('/')}/{path.name}",
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
                "bin": NAME,
            }
        )
    document = {
        "apiVersion": "krew.googlecontainertools.github.com/v1alpha2",
        "kind": "Plugin",
        "metadata": {"name": "narthex"},
        "spec": {
            "version": f"v{version}",
            "homepage": "https://narthex.dev",
            "shortDescription": "Explain packet paths through Services",
            "description": "Explains the path of a packet through the Service network of a cluster, step by step, and why it fails; compares\n"
            "the rules of nodes with the cluster's objects. Works with kube-proxy in any mode and with Narthex. It only reads, says\n"
            "first what it will run on nodes, and leaves nothing behind.\n",
            "caveats": f"It is a Python program, and Python is not in the archive: python3 on the PATH must be one of {', '.join(pythons)}.\n"
            "It needs the permission to list Services, EndpointSlices, Nodes, and Pods, and to run commands in pods of the namespace\n"
            "kube-system. Without a pod of Narthex on a node, it creates a pod there for a moment, with the image busybox.\n",
            "platforms": platforms,
        },
    }
    return yaml.safe_dump(document, sort_keys=False, width=120)


def build(wheel: Path, url: str, into: Path, platforms: Sequence[str], pythons: Sequence[str]) -> Path:
    """Write an archive for each platform, and the manifest; return its path."""
    into.mkdir(exist_ok=True)
    archives = {}
    for platform in platforms:
        with tempfile.TemporaryDirectory() as folder:
            sites = {python: Path(folder) / python for python in pythons}
            for python, site in sites.items():
                install(wheel, platform, python, site)
            archives[platform] = into / archive_name(platform)
            archive(archives[platform], sites)
    version = wheel.name.split("-")[1]
    path = into / "narthex.yaml"
    path.write_text(manifest(version, url, archives, pythons))
    return path


def own_platform() -> str:
    """Return the platform of this machine as Krew names it."""
    machine = platform_of.machine()
    return f"linux/{ {'x86_64': 'amd64', 'aarch64': 'arm64'}.get(machine, machine) }"


def main() -> None:
    """Read the arguments and build."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("url")
    parser.add_argument("--into", type=Path, default=ROOT / "dist-kubectl")
    parser.add_argument("--platform", action="append", choices=PLATFORMS)
    parser.add_argument("--python", action="append", choices=PYTHONS)
    asked = parser.parse_args()
    print(build(asked.wheel, asked.url, asked.into, asked.platform or tuple(PLATFORMS), asked.python or PYTHONS))


if __name__ == "__main__":
    main()
