"""What mkdocs.yml needs of Python: pages of the repository outside docs/, and the reference of public names.

- READMEs and CONTRIBUTING.md become pages; links of all pages to other files of the repository lead to copies of them.
- A notebook becomes a page of the same name, with what its cells have printed; it stays there to be opened.
- Each package has a page of its public names, `reference/<package>.md`, which mkdocstrings fills from the docstrings.
  Sources are read, not imported. A public name without a docstring is a warning, which `--strict` makes an error.
"""

from __future__ import annotations

import logging
import posixpath
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from snippets import page_text  # hooks are imported from their own folder

ROOT = Path(__file__).resolve().parents[1]
LOG = logging.getLogger("mkdocs.hooks.site")
SOURCES = sorted(ROOT.glob("packages/*/src"))
UMBRELLA = "hyper_parallel"
"""Exports the names of the others, and some of its own."""
OWN = ("run_ranks",)
PAGES = {"README.md": "repository.md", "CONTRIBUTING.md": "contributing.md", "programs/README.md": "programs.md"}
"""Pages of the repository, by their places in the site."""
PAGES |= {f"packages/{source.parent.name}/README.md": f"packages/{source.parent.name}.md" for source in SOURCES}
_EXAMPLE = re.compile(r"^( *)Example:$", re.MULTILINE)
_CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\((?!https?://|#)([^)\s]+)\)")
_INFO = re.compile(r"^(```\w+) (?!title=)[^\n]*$", re.MULTILINE)


class Examples(griffe.Extension):
    """Reads `Example:` in docstrings as `Examples:`, the name that griffe knows."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(r"\1Examples:", obj.docstring.value)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Name the packages' pages for the navigation."""
    names = [source.parent.name for source in SOURCES]
    assert config.nav is not None
    for section in config.nav:
        if isinstance(section, dict) and "Reference" in section:
            section["Reference"] += [{name: f"reference/{name}.md"} for name in names]
        if isinstance(section, dict) and "Packages" in section:
            section["Packages"] = [{"The repository": PAGES["README.md"]}, {"Contributing": PAGES["CONTRIBUTING.md"]}]
            section["Packages"] += [{"Programs": PAGES["programs/README.md"]}]
            section["Packages"] += [{name: f"packages/{name}.md"} for name in names]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the repository, the files that pages link to, and the reference."""
    linked: set[str] = set()
    for place in sorted(ROOT.glob("docs/*/*.ipynb")):
        page = place.relative_to(ROOT / "docs").with_suffix(".md").as_posix()
        text = page_text(place)
        linked |= {target for target, _ in _targets(text, f"docs/{page}")}
        files.append(File.generated(config, page, content=text))
    for place, page in PAGES.items():
        text = (ROOT / place).read_text("utf-8")
        linked |= {target for target, _ in _targets(text, place)}
        files.append(File.generated(config, page, content=text))
    for file in files.documentation_pages():
        if file.generated_by is None:
            linked |= {target for target, _ in _targets(file.content_string, f"docs/{file.src_uri}")}
    for target in sorted(linked):
        if not target.startswith("docs/") and target not in PAGES and (ROOT / target).is_file():
            files.append(File.generated(config, target, abs_src_path=str(ROOT / target)))
    for name, text in _reference():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to where the site has their files; leave out what only the tests read of a block's first line."""
    here = next((place for place, each in PAGES.items() if each == page.file.src_uri), f"docs/{page.file.src_uri}")
    blocks: list[str] = []

    def keep(match: re.Match[str]) -> str:
        blocks.append(_INFO.sub(r"\1", match[0], count=1))
        return f"\0{len(blocks) - 1}\0"

    def lead(match: re.Match[str]) -> str:
        (target, anchor), place = _resolve(match[1], here), page.file.src_uri
        if target.startswith("docs/"):
            there = target.removeprefix("docs/")
            if there.endswith(".ipynb") and there.removesuffix(".ipynb") != place.removesuffix(".md"):
                there = there.removesuffix(".ipynb") + ".md"  # its page; the page itself leads to the notebook
        elif (ROOT / target).is_dir():
            there = PAGES.get(f"{target}/README.md") or _first(target, files)
        else:
            there = PAGES.get(target, target)
        if not there:
            LOG.warning(f"{here}: the link {match[1]} leads to nothing of the site")
        return f"]({posixpath.relpath(there, posixpath.dirname(place) or '.')}{anchor})"

    text = _LINK.sub(lead, _CODE.sub(keep, markdown))
    return re.sub(r"\0(\d+)\0", lambda match: blocks[int(match[1])], text)


def _resolve(link: str, page: str) -> tuple[str, str]:
    path, mark, anchor = link.partition("#")
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), path)), mark + anchor


def _targets(text: str, page: str) -> Iterator[tuple[str, str]]:
    for link in _LINK.findall(_CODE.sub("", text)):
        yield _resolve(link, page)


def _first(folder: str, files: Files) -> str:
    """Return a file of a folder that has no page: the first that is in the site."""
    return min((file.src_uri for file in files if file.src_uri.startswith(f"{folder}/")), default="")


def _reference() -> Iterator[tuple[str, str]]:
    """Write a page for each package: what it is, and its public names in order."""
    loader = griffe.GriffeLoader(search_paths=[str(source) for source in SOURCES])
    for source in SOURCES:
        loader.load(source.parent.name.replace("-", "_"))
    loader.resolve_aliases(implicit=True, external=False)
    for source in SOURCES:
        name = source.parent.name
        package = loader.modules_collection[name.replace("-", "_")]
        exports = OWN if package.path == UMBRELLA else sorted(str(export) for export in package.exports or ())
        about = package.docstring.value if package.docstring is not None else ""
        parts = [f"# {name}: names\n\n{about}\n\nWhat it is for: [the package's page](../packages/{name}.md).\n"]
        for export in exports:
            target = _target(package, export)
            if target is None or not target.has_docstring:
                LOG.warning(f"{package.path}.{export} has no docstring")
            else:
                _check_members(target)
                parts.append(f"::: {target.path}\n" + _inherited(target, exports))
        yield name, "\n".join(parts)


def _inherited(target: griffe.Object, exports: Iterable[str]) -> str:
    """Show methods of a base that has no place of its own on the page, such as the setters of `HSDPModule`."""
    if isinstance(target, griffe.Class) and any(base.name not in exports for base in target.resolved_bases):
        return "    options: { inherited_members: true }\n"
    return ""


def _target(package: griffe.Object, name: str) -> griffe.Object | None:
    member = package.members.get(name)
    try:
        return member.final_target if isinstance(member, griffe.Alias) else member
    except griffe.AliasResolutionError:
        return None


def _check_members(target: griffe.Object) -> None:
    """Warn of public methods and properties without a docstring; an override is documented where it is declared."""
    if not isinstance(target, griffe.Class) or len(target.resolved_bases) < len(target.bases):
        return  # a base of a framework may declare any of them
    inherited = {name for base in target.mro() for name in base.members}
    for name, member in target.members.items():
        described = member.is_function or "property" in member.labels
        if name.startswith("_") or member.is_alias or not described or name in inherited or member.has_docstring:
            continue
        LOG.warning(f"{target.path}.{name} has no docstring")
