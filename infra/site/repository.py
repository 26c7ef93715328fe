"""What the site has of the repository besides docs/: its pages, and names instead of links to code.

The repository has no address that a page could link to. A link to a file that is no page of the
site becomes the file's name; one to a file that does not exist stops the build.
"""

from __future__ import annotations

import fnmatch
import os
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).resolve().parents[2]
PAGES: Final = {
    "README.md": "index.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "SECURITY.md": "SECURITY.md",
}
"""Pages beside docs/, and where they are in the site."""

_LINK: Final = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
_BLOCK: Final = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    names = sorted(file.src_uri for file in files.documentation_pages())
    config.nav = _expanded(config.nav, names, _named(config.nav))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turn links into those of the site."""
    of_page = {ours: theirs for theirs, ours in PAGES.items()}
    source = of_page.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    parts = _BLOCK.split(markdown)
    for index in range(0, len(parts), 2):
        parts[index] = _LINK.sub(
            lambda link: _in_the_site(link, source, page.file.src_uri), parts[index]
        )
    return "".join(parts)


def _in_the_site(link: re.Match[str], source: str, page: str) -> str:
    text, (target, mark, anchor) = link["text"], link["target"].partition("#")
    if not target or "://" in target or target.startswith("mailto:"):
        return link[0]
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    if not (ROOT / path).exists():
        raise PluginError(f"{source} links to {path}, which does not exist")
    here = PAGES.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
    if here is not None and (ROOT / path).is_file():
        return f"[{text}]({os.path.relpath(here, posixpath.dirname(page) or '.')}{mark}{anchor})"
    name = posixpath.basename(path)
    return text if name in text else f"{text} (`{path}`)"


def _named(nav: list[Any]) -> set[str]:
    """The pages that the navigation names itself."""
    found = set()
    for entry in nav:
        if isinstance(entry, str):
            found.add(entry)
        else:
            for inner in entry.values():
                found |= _named(inner)
    return found


def _expanded(nav: list[Any], names: list[str], named: set[str]) -> list[Any]:
    """The navigation with pages in place of its patterns."""
    entries: list[Any] = []
    for entry in nav:
        if isinstance(entry, str):
            matching = fnmatch.filter(names, entry) if "*" in entry else [entry]
            entries += [each for each in matching if each == entry or each not in named]
        else:
            entries.append(
                {title: _expanded(inner, names, named) for title, inner in entry.items()}
            )
    return entries
