"""Build the site from the documents of the repository: `python scripts/docs_site.py [DIRECTORY]`, by default build/site.

The site has the layout of the repository, so that each relative link works here and there. Pages are all Markdown files that are
reachable from README.md; other files that they link to are copied. A linked folder without a README gets a list of its files. Two pages
are made here: the Python API from docstrings, and pictures that the program draws. Fonts and scripts come with the site.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

import narthex
from narthex.api import load, trace

ROOT = Path(__file__).parents[1]
PLAYGROUND = ROOT / "playground" / "build" / "site"
LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)")
CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]+`", re.MULTILINE | re.DOTALL)
API = "docs/reference/python.md"
PICTURES = "docs/pictures/README.md"
SECTIONS = (
    ("Tutorials", "docs/tutorial"),
    ("How-to guides", "docs/howto"),
    ("Explanation", "docs/explanation"),
    ("Reference", "docs/reference"),
    ("Decisions", "docs/adr"),
    ("Releases", "docs/releases"),
    ("Examples", "examples"),
)
"""Groups of the navigation, and the folders of their pages."""
FIRST = ("README.md", "README.zh-CN.md")
PROJECT = (
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "STYLE.md",
    "SECURITY.md",
    "GOVERNANCE.md",
    "CODE_OF_CONDUCT.md",
    "CHANGELOG.md",
)


def main(target: Path) -> int:
    """Build the site. Return an exit status."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        stage(source)
        file = Path(folder) / "mkdocs.yml"
        file.write_text(yaml.dump(configuration(source, target.resolve()), sort_keys=False))
        argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(file)]
        return subprocess.run(argv, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=False).returncode


def stage(source: Path) -> None:
    """Write the Markdown files and all that they link to into a folder with the layout of the repository."""
    waiting = [ROOT / "README.md", *(ROOT / name for name in PROJECT)]
    waiting += [page for _, folder in SECTIONS for page in sorted((ROOT / folder).rglob("*.md"))]
    waiting += [page for name in FIRST if (page := ROOT / name).exists()]
    done: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path in done:
            continue
        done.add(path)
        copy = source / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix != ".md":
            shutil.copyfile(path, copy)
            continue
        text = path.read_text()
        text, targets = _with_files_for_folders(text, path)
        copy.write_text(text)
        waiting += [target for target in targets if target.is_file() and target.is_relative_to(ROOT)]
        for target in targets:
            if target.is_dir():
                _list_folder(target, source)
    _write_api(source / API)
    _write_pictures(source / PICTURES)
    if PLAYGROUND.is_dir():
        shutil.copytree(PLAYGROUND, source / "playground" / "build" / "site")


def _with_files_for_folders(text: str, path: Path) -> tuple[str, list[Path]]:
    """Return a page whose links to folders lead to files, and the files and folders that it links to."""
    targets = []

    def link(found: re.Match[str]) -> str:
        """Return the link, to the file that stands for a folder."""
        if "://" in found[1] or found[1].startswith("mailto:"):
            return found[0]
        target = Path(os.path.normpath(path.parent / found[1]))
        if not target.is_dir():
            targets.append(target)
            return found[0]
        readme = target / "README.md"
        targets.append(readme if readme.exists() else target)
        name = "README.md" if readme.exists() else "index.md"
        return found[0].replace(found[1], f"{found[1].rstrip('/')}/{name}", 1)

    codes = [found.span() for found in CODE.finditer(text)]

    def outside_code(found: re.Match[str]) -> str:
        """Leave links in code as they are."""
        inside = any(begin <= found.start() < end for begin, end in codes)
        return found[0] if inside else link(found)

    return LINK.sub(outside_code, text), targets


def _list_folder(folder: Path, source: Path) -> None:
    names = sorted(f"{each.name}/" if each.is_dir() else each.name for each in folder.iterdir() if each.name[0] != "_")
    page = source / folder.relative_to(ROOT) / "index.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(f"* `{name}`\n" for name in names)
    page.write_text(f"# {folder.relative_to(ROOT)}/\n\nFiles of this folder in the repository:\n\n{lines}")


def _write_api(page: Path) -> None:
    names = [name for name in narthex.__all__ if not name.startswith("_")]
    parts = [f"\n::: narthex.api.{name}\n" for name in sorted(names)]
    text = "Made from the docstrings of `narthex.api`. [Python API](api.md) shows them in use.\n"
    page.write_text(f"# Python API, name by name\n\n{text}{''.join(parts)}")


def _write_pictures(page: Path) -> None:
    """Draw paths of the example `shop`, one of them over the rules of a bug report."""
    shop = load(ROOT / "examples" / "shop", node="node-a", cluster_cidr="10.244.0.0/16")
    rules = ROOT / "examples" / "bug-report" / "shop-node-a.txt"
    drawn = (
        ("node-port", "A node port, as Narthex serves it", trace(shop, "outside", "node-a:30080")),
        ("bug-report", "The same node port, by the rules of a bug report", trace(shop, "outside", "node-a:30080", rules=[rules])),
        ("cluster-ip", "A pod and a cluster IP", trace(shop, "10.244.1.5", "shop/web")),
    )  # fmt: skip
    page.parent.mkdir(parents=True, exist_ok=True)
    parts = ["# Pictures\n\nThe program drew these pictures while this site was built: `narthex trace -o svg`.\n"]
    for name, title, explanation in drawn:
        (page.parent / f"{name}.svg").write_text(explanation.picture("svg"))
        parts.append(f"\n## {title}\n\n![{title}]({name}.svg)\n\n```\n{explanation}\n```\n")
    page.write_text("".join(parts))


def navigation(source: Path) -> list[dict[str, object]]:
    """Return the navigation of staged pages."""
    found: list[dict[str, object]] = []
    titles = {"README.md": "Narthex", "README.zh-CN.md": "中文"}
    found += [{titles[name]: name} for name in FIRST if (source / name).exists()]
    for title, folder in SECTIONS:
        pages = [str(page.relative_to(source)) for page in sorted((source / folder).rglob("*.md"))]
        found.append({title: sorted(pages, key=lambda page: (page.count("/"), page))})
    found.append({"Pictures": PICTURES})
    if PLAYGROUND.is_dir():
        found.append({"Playground": "playground/build/site/index.html"})
    found.append({"Project": [name for name in PROJECT if (source / name).exists()]})
    return found


def configuration(source: Path, target: Path) -> dict[str, object]:
    """Return the configuration of mkdocs."""
    slugs = {"toc": {"permalink": True, "slugify": _Slugify()}}
    code = ["pymdownx.superfences", "pymdownx.highlight", "tables", "sane_lists", "attr_list", slugs]
    docstrings = {"show_source": False, "show_root_heading": True, "show_root_full_path": False, "heading_level": 2}
    handlers = {"python": {"paths": [str(ROOT / "src")], "options": {**docstrings, "docstring_style": "google"}}}
    return {
        "site_name": "Narthex",
        "site_description": "The Kubernetes Service network in Python",
        "docs_dir": str(source),
        "site_dir": str(target),
        # Pages are files, so that links work without a server, too. Only the search needs one.
        "use_directory_urls": False,
        "extra": {"generator": False},
        "theme": {
            "name": "material",
            # Fonts of the reader's system: nothing is loaded from elsewhere.
            "font": False,
            "features": ["navigation.tabs", "navigation.indexes", "content.code.copy", "search.suggest"],
            "palette": [
                {"media": "(prefers-color-scheme: light)", "scheme": "default"},
                {"media": "(prefers-color-scheme: dark)", "scheme": "slate"},
            ],
        },
        "plugins": ["search", {"mkdocstrings": {"handlers": handlers}}],
        "markdown_extensions": code,
        "validation": {
            "nav": {"omitted_files": "ignore", "not_found": "warn", "absolute_links": "warn"},
            "links": {"not_found": "warn", "anchors": "warn", "absolute_links": "warn", "unrecognized_links": "warn"},
        },
        "nav": navigation(source),
    }


class _Slugify:
    """Anchors as GitHub makes them, so that links to headings work in both places."""


def _slugify_node(dumper: yaml.Dumper, _: _Slugify) -> yaml.Node:
    tag = "tag:yaml.org,2002:python/object/apply:pymdownx.slugs.slugify"
    return dumper.represent_mapping(tag, {"kwds": {"case": "lower"}})


yaml.add_representer(_Slugify, _slugify_node)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "site"))
