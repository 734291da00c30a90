"""How Sphinx makes the site of the pages: `scripts/docs` runs it.

The pages stay Markdown that reads well in a checkout, so nothing in them is written for Sphinx. This file makes up for
that while Sphinx reads them:

- The source folder is the root of the checkout: so the links of the pages, also those to README.md, lead where they
  lead in a checkout.
- The navigation is `docs/index.md`: its headings are the parts, and its tables name the pages (`navigation.py`).
- A `<picture>` of two files becomes two images, of which the theme shows the one that fits.
- A diagram in Mermaid's words becomes an SVG in the page, without a network (`diagrams.py`).
- A link to a file or folder that is no page, such as a script in Lua, becomes text: the site has no sources.
"""

from __future__ import annotations

import re
import shutil
import sys
import tomllib
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pygments.lexers.shell import BashLexer

sys.path.insert(0, str(Path(__file__).parent))

import api
import diagrams
import navigation

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

ROOT: Final = Path(__file__).parents[2]

project = "interlock"
copyright = "the authors of interlock, Apache-2.0"  # noqa: A001 (Sphinx's word)
version = release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
root_doc = "docs/index"
include_patterns = [
    "README.md", "README.zh.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**.md",
    "examples/**/README.md",
]  # fmt: skip
exclude_patterns = [".*", "**/.*", "src", "tests", "bench", "simulator", "scripts", "dist"]

nitpicky = True
# Names of Python itself and of private modules, which signatures contain: the site links to no other site.
nitpick_ignore_regex = [("py:.*", r"(?!interlock\.[a-z]).*"), ("py:.*", r".*\._.*"), ("py:.*", r".*\.(P|R|T|\w+T)$")]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 6
suppress_warnings = ["ref.python"]  # a bare `Lease` in a signature: that of threads or of asyncio, as the page

default_role = "code"  # docstrings write `name`
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_display_short_literal_types = True
python_maximum_signature_line_length = 90
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = "interlock"
html_copy_source = False
html_show_sphinx = False
html_static_path = ["static"]
html_css_files = ["site.css"]
templates_path = ["templates"]
html_additional_pages = {"index": "start.html"}
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#116329", "color-brand-content": "#0b57a4"},
    "dark_css_variables": {"color-brand-primary": "#56d364", "color-brand-content": "#79b8ff"},
    "navigation_with_keys": True,
}
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True

PICTURE: Final = re.compile(
    r'<picture><source media="\(prefers-color-scheme: dark\)" srcset="([^"]+)">\s*'
    r'<img src="([^"]+)" alt="([^"]*)"></picture>'
)
LINK: Final = re.compile(r"(?<!!)\[((?:[^\]\\]|\\.)+)\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")
FENCED: Final = re.compile(r"^(```|~~~).*?^\1\s*?$", re.MULTILINE | re.DOTALL)


def _picture(found: re.Match[str]) -> str:
    dark, light, alt = found.groups()
    return f'<img class="only-light" src="{light}" alt="{alt}"><img class="only-dark" src="{dark}" alt="{alt}">'


def _link(found: re.Match[str], page: Path) -> str:
    """The link if it leads to a page or a picture, of a folder to its page; else its text."""
    text, target, anchor = found[1], found[2], found[3] or ""
    path = page.parent / target
    if path.is_dir() and (path / "README.md").exists():
        return f"[{text}]({target.rstrip('/')}/README.md{anchor})"
    return found[0] if path.suffix in {".md", ".svg", ".png"} else text


def as_sphinx_reads_it(text: str, page: Path) -> str:
    """The text of a page in a checkout, in the words of MyST."""
    parts, end = [], 0
    for fenced in FENCED.finditer(text):
        parts += [_prose(text[end : fenced.start()], page), fenced[0]]
        end = fenced.end()
    text = "".join([*parts, _prose(text[end:], page)])
    return api.filled(diagrams.drawn(text))


def _prose(text: str, page: Path) -> str:
    return LINK.sub(lambda found: _link(found, page), PICTURE.sub(_picture, text))


def _is_index(docname: str) -> bool:
    return "/" in docname and docname.endswith(("/README", "/index"))


def _read(app: Sphinx, docname: str, content: list[str]) -> None:
    page = Path(app.env.doc2path(docname))
    if page.suffix == ".md":
        content[0] = as_sphinx_reads_it(content[0], page)
        if docname == root_doc:
            content[0] += navigation.toctrees(page)
        elif docname.startswith("examples/"):  # a page leads there, not the navigation
            content[0] = f"---\norphan: true\n---\n\n{content[0]}"
        elif _is_index(docname):
            content[0] += navigation.folder(page, ROOT / f"{root_doc}.md")


def _always(_app: Sphinx, env: BuildEnvironment, *_: object) -> list[str]:
    """The pages whose navigation depends on other files."""
    return [docname for docname in env.found_docs if _is_index(docname)]


def _finish(app: Sphinx, exception: Exception | None) -> None:
    """The pictures that raw HTML names stand beside the pages, as in a checkout."""
    if exception is None:
        for path in (each for kind in ("svg", "png") for each in (ROOT / "docs").rglob(f"*.{kind}")):
            target = Path(app.outdir) / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


def setup(app: Sphinx) -> None:
    """Sphinx calls this."""
    app.add_lexer("crontab", BashLexer)
    own = "".join(path.read_text() for path in sorted(Path(__file__).parent.glob("*.py")))
    app.add_config_value("made_by", sha256(own.encode()).hexdigest(), "env", str)  # another one: all pages anew
    app.connect("source-read", _read)
    app.connect("autodoc-process-docstring", api.as_sphinx_reads_it)
    app.connect("env-get-outdated", _always)
    app.connect("build-finished", _finish)
