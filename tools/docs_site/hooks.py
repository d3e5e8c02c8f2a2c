# SPDX-License-Identifier: Apache-2.0
"""What the pages of the repository need to be a site: mkdocs calls these functions.

Links are written as GitHub reads them, by paths in the repository. Pages that are not under docs/
join the site, and a link to a file that is no part of it becomes the file's path.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Pages outside of docs/: their path in the repository, and on the site.
OTHERS = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "examples/README.md": "examples/README.md",
    "patches/README.md": "patches/README.md",
}
_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that are not under docs/."""
    from mkdocs.structure.files import File

    for path, on_site in OTHERS.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        files.append(File.generated(config, on_site, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """A page with links that hold on the site."""
    return with_links_of_the_site(markdown, page.file.src_uri)


def with_links_of_the_site(markdown: str, on_site: str) -> str:
    """The text of a page; `on_site` is its path there, such as `results/README.md`."""
    path = next((path for path, uri in OTHERS.items() if uri == on_site), f"docs/{on_site}")

    def of_the_site(link: re.Match[str]) -> str:
        mark, text, target = link.groups()
        text = _LINK.sub(of_the_site, text)  # a picture that is a link
        found, separator, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target) or not found:
            return f"{mark}[{text}]({target})"
        found = posixpath.normpath(posixpath.join(posixpath.dirname(path), found))
        if found in OTHERS:
            found = OTHERS[found]
        elif found.startswith("docs/") and (ROOT / found).is_file():
            found = found.removeprefix("docs/")
        else:
            name = text.strip("`")
            return (
                f"`{found}`"
                if name in (found, posixpath.basename(found))
                else f"{text} (`{found}`)"
            )
        relative = posixpath.relpath(found, posixpath.dirname(on_site) or ".")
        return f"{mark}[{text}]({relative}{separator}{anchor})"

    parts = _FENCED.split(markdown)
    parts[::2] = [_LINK.sub(of_the_site, prose) for prose in parts[::2]]
    return "".join(parts)
