"""A plain installation lacks optional packages; the error names the extra that brings them."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHOP = ["--manifests", str(ROOT / "examples" / "shop"), "--node", "node-a", "--cluster-cidr", "10.244.0.0/16"]
WITHOUT = "import sys; sys.modules[{name!r}] = None; from narthex.cli import main; main()"


def narthex(*arguments, without):
    argv = [sys.executable, "-c", WITHOUT.format(name=without), *arguments]
    return subprocess.run(argv, cwd=ROOT / "src", capture_output=True, text=True, check=False)


def test_a_missing_package_is_named_with_its_extra():
    done = narthex("trace", "shop/web-1", "web.shop.svc.cluster.local:80", *SHOP, without="dns")
    assert done.returncode == 1
    assert done.stderr == (
        "Error: this needs the Python package dnspython, which is not installed: pip install 'narthex[dns]'\n"
    )


def test_a_path_by_address_needs_no_extra():
    done = narthex("trace", "outside", "node-a:30080", *SHOP, without="dns")
    assert done.returncode == 0 and "delivered" in done.stdout
