"""The site of the documentation builds, and no page of it loads anything from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "infra" / "site" / "mkdocs.yml"
LOADING = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole site, built as `make docs` does: a broken link or a page without a place fails."""
    folder = tmp_path_factory.mktemp("site")
    mkdocs = str(Path(sys.executable).with_name("mkdocs"))
    done = subprocess.run(
        [mkdocs, "build", "--strict", "-f", str(CONFIG), "-d", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_in_the_site(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    expected = {
        page.with_name("index.html") if page.name == "README.md" else page.with_suffix(".html")
        for page in pages
    }
    built = {path.relative_to(site) for path in site.rglob("*.html")}
    root_pages = {Path(each) for each in ("CHANGELOG.html", "CONTRIBUTING.html", "SECURITY.html")}
    assert built == expected | root_pages | {Path("index.html"), Path("404.html")}


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    for path in site.rglob("*.html"):
        loaded = Loaded()
        loaded.feed(path.read_text())
        outside = [each for each in loaded.urls if re.match(r"(\w+:)?//", each)]
        assert not outside, path
        # The theme would fetch a renderer for these.
        assert 'class="mermaid"' not in path.read_text(), path
    for path in site.rglob("*.css"):
        outside = re.findall(r"@import|url\(\s*[\"']?(?:https?:)?//", path.read_text())
        assert not outside, path


def test_a_link_to_code_becomes_its_name(site: Path) -> None:
    """The repository has no address that a page could link to."""
    for path in site.rglob("*.html"):
        assert not re.search(r'href="[^"]*\.(py|service|conf|toml)[#"]', path.read_text()), path


class Loaded(HTMLParser):
    """What a browser fetches to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        is_hint = tag == "link" and given.get("rel") in {"canonical", "next", "prev"}
        if (url := given.get(LOADING.get(tag, ""))) and not is_hint:
            self.urls.append(url)
