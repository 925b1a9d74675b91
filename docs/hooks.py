"""What the site has beyond the files of docs/: pages made of the repository's own texts and of the configuration.

README.md and its like stay where a repository has them and are pages of the site as well. `configuration.md` is
made from the pydantic models, so that it cannot disagree with what a run accepts.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from raypost.config import Config
from raypost.config.sentences import field_sentences

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "tests/README.md": "testing.md",
}
"""Texts of the repository that are pages of the site, and under which name."""

LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
FIELDS_HERE = "<!-- fields -->"
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the repository's own texts as pages."""
    for source, page in PAGES.items():
        files.append(
            File.generated(config, page, content=relinked((ROOT / source).read_text(), Path(source)))
        )
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in the fields of the configuration, and resolve links that lead out of docs/."""
    source = page.file.src_uri
    if source in PAGES.values():
        return markdown
    return relinked(markdown, Path("docs") / source).replace(FIELDS_HERE, configuration_reference())


def relinked(text: str, source: Path) -> str:
    """Return the text of the repository's file `source` with links as the site needs them.

    Links to what is a page of the site lead there; of links to other files of the repository the text remains.
    """

    def replace(match: re.Match[str]) -> str:
        image, label, target = match.groups()
        if target.startswith(("http:", "https:", "mailto:", "#")):
            return match[0]
        file, _, anchor = target.partition("#")
        path = (ROOT / source.parent / file).resolve().relative_to(ROOT)
        page = PAGES.get(str(path)) or (str(path.relative_to("docs")) if path.parts[0] == "docs" else None)
        if page is None:
            return label
        return f"{image}[{label}]({page}{'#' + anchor if anchor else ''})"

    return LINK.sub(replace, text)


def configuration_reference() -> str:
    """Return a section for every model of the configuration, with a row for each of its fields."""
    sections: list[str] = []
    waiting: list[tuple[type[BaseModel], str]] = [(Config, "")]
    seen: set[type[BaseModel]] = set()
    while waiting:
        model, place = waiting.pop(0)
        if model in seen:
            continue
        seen.add(model)
        rows = ["| field | type | default | meaning |", "|---|---|---|---|"]
        sentences = field_sentences(model)
        for name, field in model.model_fields.items():
            nested = models_in(field.annotation)
            waiting += [(one, f"{place}{name}.") for one in nested]
            cells = (
                f"`{name}`",
                type_text(field.annotation, field),
                default_text(field),
                meaning(sentences.get(name), nested),
            )
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        title = f"`{place.rstrip('.')}`: {model.__name__}" if place else model.__name__
        summary = " ".join((model.__doc__ or "").split())
        sections.append(f"## {title} {{#{model.__name__.lower()}}}\n\n{summary}\n\n" + "\n".join(rows))
    return "\n\n".join(sections)


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the models that a field of this type holds."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in models_in(part)]


def type_text(annotation: Any, field: FieldInfo | None = None) -> str:
    """Return a type in words a YAML file has: choices as they are written, null for None, bounds in brackets."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        limits = [limit for part in parts[1:] for limit in getattr(part, "metadata", [part])]
        return type_text(parts[0]) + bounds_text(limits)
    if origin is Literal:
        text = ", ".join(f"`{part}`" for part in parts)
    elif origin in (Union, UnionType):
        text = " or ".join(type_text(part) for part in parts)
    elif origin in (tuple, list):
        text = f"list of {type_text(parts[0])}"
    elif origin is dict:
        text = f"mapping of {type_text(parts[0])} to {type_text(parts[1])}"
    elif annotation is NoneType:
        text = "null"
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        text = f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    else:
        text = {
            "str": "text",
            "Path": "path",
            "int": "integer",
            "float": "number",
            "bool": "true or false",
        }.get(getattr(annotation, "__name__", ""), "any")
    return text + bounds_text(field.metadata if field else [])


def bounds_text(limits: list[Any]) -> str:
    """Return the bounds that pydantic checks, such as " (≥ 0, < 1)"."""
    found = [
        f"{sign} {getattr(limit, name)}"
        for limit in limits
        for name, sign in BOUNDS.items()
        if hasattr(limit, name)
    ]
    found += [f"matching `{limit.pattern}`" for limit in limits if getattr(limit, "pattern", None)]
    found += [f"at least {limit.min_length}" for limit in limits if getattr(limit, "min_length", None)]
    return f" ({', '.join(found)})" if found else ""


def default_text(field: FieldInfo) -> str:
    """Return a field's default as a YAML file would have it."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, BaseModel):
        return "its own"
    if value is None or isinstance(value, bool):
        return f"`{str(value).lower().replace('none', 'null')}`"
    if isinstance(value, tuple):
        value = list(value)
    return f"`{value}`" if str(value) else '`""`'


def meaning(sentence: str | None, nested: list[type[BaseModel]]) -> str:
    """Return a field's sentence; a section without one of its own has that of its model."""
    if sentence:
        return sentence
    return " ".join((nested[0].__doc__ or "").split()) if nested else ""
