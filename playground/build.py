"""Build the playground into `playground/build/site`, a folder that any static host can serve: `make playground`.

The interpreter comes from the npm package `pyodide`, msgspec from its own wheel for WebAssembly, and the other packages
from the environment that this runs in. Node compiles the modules. With `--for-tests`, what `run_tests.mjs` needs is
prepared as well.
"""

from __future__ import annotations

import gzip
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from narthex.trace.render import html, svg

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "src" / "narthex"
BUILD = HERE / "build"
SITE = BUILD / "site"

LEFT_OUT = ("cni", "lab", "node", "overlay", "testing")
"""Products that no explanation imports."""
INTERPRETER = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm")
LIBRARY = "python_stdlib.zip"
DARK = "@media (prefers-color-scheme: dark) {"
OF_DOCUMENT = re.compile(r"^(?::root|body) \{[^}]*\}[ \n]?|^@media print \{ body .*\n", re.MULTILINE)
"""Rules of a whole page, which this one has itself."""
LARGEST = 12_000_000
"""Bytes of all files, compressed as a static host sends them."""
WHEEL = (
    "--python-version",
    "3.14",
    "--implementation",
    "cp",
    "--abi",
    "cp314",
    "--platform",
    "pyemscripten_2026_0_wasm32",
)
"""The interpreter's version of Python and its platform (PEP 783)."""


def main() -> int:
    """Build everything anew except for downloads; return 1 if the result is too large."""
    _install_interpreter()
    shutil.rmtree(SITE, ignore_errors=True)
    SITE.mkdir(parents=True)
    package = BUILD / "npm" / "node_modules" / "pyodide"
    for name in INTERPRETER:
        shutil.copyfile(package / name, SITE / name)
    shared = (SOURCE / "lab" / "ui" / "static" / name for name in ("icon.svg", "theme.js"))
    for path in (*(HERE / "page").iterdir(), *shared):
        shutil.copyfile(path, SITE / path.name)
    (SITE / "ticket.css").write_text(ticket_style())
    (SITE / "gallery.json").write_text(json.dumps(gallery(), ensure_ascii=False))
    _write_library(package / LIBRARY, SITE / LIBRARY)
    _write_modules(SITE / "narthex.zip")
    sizes = {path.name: path.stat().st_size for path in sorted(SITE.iterdir())}
    lock = json.loads((package / "pyodide-lock.json").read_text())
    lock["packages"] = {}
    built = {"SIZES": sizes, "LOCK": json.dumps(lock)}
    lines = "".join(f"export const {name} = {json.dumps(value)};\n" for name, value in built.items())
    (SITE / "built.js").write_text(
        f"// Bytes of each file, and what the interpreter knows about packages: none.\n{lines}"
    )
    return _report()


def ticket_style() -> str:
    """Return the style of the page for a ticket as that of the element `#ticket`, with the theme that the user chose."""
    light, dark = "", ""
    for style in (html.STYLE, svg.STYLE):
        begin, _, rest = style.partition(DARK)
        block, _, end = rest.partition("\n}\n")
        light, dark = light + begin + end, dark + block
    light, dark = (re.sub(r"(?<![.\w])h([123])\b", r".was-h\1", OF_DOCUMENT.sub("", each)) for each in (light, dark))
    return f'#ticket {{{light}}}\n@media screen {{ :root[data-theme="dark"] #ticket {{{dark}\n}} }}\n'


def gallery() -> list[dict[str, object]]:
    """Return the examples with their files, in the order of the page."""
    examples = json.loads((HERE / "gallery" / "gallery.json").read_text())
    for example in examples:
        example["files"] = [[name, (HERE / "gallery" / name).read_text()] for name in example["files"]]
    return list(examples)


def _install_interpreter() -> None:
    """Install the npm package unless the version that `package.json` names is there."""
    folder = BUILD / "npm"
    wanted = (HERE / "package.json").read_text()
    if not (folder / "node_modules" / "pyodide").exists() or (folder / "package.json").read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        command = (
            "npm",
            "install",
            "--no-audit",
            "--no-fund",
            "--no-package-lock",
            "--ignore-scripts",
            "--omit=optional",
        )
        (folder / "package.json").write_text(wanted)
        try:
            subprocess.run((*command, "--loglevel=error"), cwd=folder, check=True, stdout=subprocess.DEVNULL)
        except BaseException:
            shutil.rmtree(folder)
            raise


def _write_modules(archive: Path) -> None:
    """Write Narthex and the packages that it needs, compiled, as one archive that Python imports from."""
    folder = BUILD / "modules"
    shutil.rmtree(folder, ignore_errors=True)
    unused = shutil.ignore_patterns("__pycache__", "*.pyi", "*.so", "*.txt")
    for package in (SOURCE, *map(_installed, ("click", "immutables", "yaml"))):
        shutil.copytree(package, folder / package.name, ignore=unused)
    for product in LEFT_OUT:
        shutil.rmtree(folder / "narthex" / product)
    shutil.copyfile(_installed("typing_extensions.py"), folder / "typing_extensions.py")
    shutil.copytree(HERE / "substitute", folder, dirs_exist_ok=True)
    shutil.copytree(HERE / "python", folder, dirs_exist_ok=True)
    with zipfile.ZipFile(_wheel("msgspec", ">=0.22")) as wheel:
        wheel.extractall(folder, [name for name in wheel.namelist() if name.startswith("msgspec/")])
    _compile(folder)
    _write_archive(archive, folder, sorted(_files(folder)))


def _write_library(source: Path, archive: Path) -> None:
    """Write Python's own library, compiled: the interpreter's archive has sources, which each start would compile again."""
    folder = BUILD / "library"
    shutil.rmtree(folder, ignore_errors=True)
    with zipfile.ZipFile(source) as opened:
        opened.extractall(folder)
    _compile(folder, optimize=2)
    _write_archive(archive, folder, sorted(path for path in folder.rglob("*") if path.is_file()))


def _compile(folder: Path, optimize: int = 0) -> None:
    """Replace the sources of a folder by modules that the interpreter has compiled."""
    subprocess.run(("node", str(HERE / "compile.mjs"), str(folder), str(optimize)), check=True)


def _write_archive(archive: Path, folder: Path, paths: Sequence[Path]) -> None:
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as made:
        for path in paths:
            # The same input makes the same archive.
            entry = zipfile.ZipInfo(str(path.relative_to(folder)))
            made.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED, 9)


def _files(folder: Path) -> Iterator[Path]:
    yield from (path for path in folder.rglob("*") if path.suffix in (".pyc", ".so"))


def _installed(name: str) -> Path:
    """Return the path of a package of this environment."""
    return next(Path(folder) / name for folder in sys.path if (Path(folder) / name).exists())


def _wheel(package: str, versions: str) -> Path:
    """Return a package's wheel for WebAssembly, which is downloaded once."""
    folder = BUILD / "wheels"
    if not list(folder.glob(f"{package}-*.whl")):
        command = (sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps")
        wanted = ("--only-binary", ":all:", *WHEEL, "--dest", str(folder), f"{package}{versions}")
        subprocess.run((*command, *wanted), check=True)
    return max(folder.glob(f"{package}-*.whl"))


def prepare_tests() -> None:
    """Unpack what the tests need in the interpreter in place of what is installed here."""
    with zipfile.ZipFile(_wheel("hypothesis", f"=={importlib.metadata.version('hypothesis')}")) as wheel:
        wheel.extractall(BUILD / "test-packages")


def _report() -> int:
    """Print the size of each file as a host sends it, and return 1 if all of them are too large."""
    sizes = {path.name: len(gzip.compress(path.read_bytes(), 9)) for path in sorted(SITE.iterdir())}
    for name, size in sizes.items():
        print(f"{size:>10,}  {name}")
    print(f"{sum(sizes.values()):>10,}  in all, of at most {LARGEST:,}")
    return int(sum(sizes.values()) > LARGEST)


if __name__ == "__main__":
    if sys.argv[1:] == ["--for-tests"]:
        prepare_tests()
    sys.exit(main())
