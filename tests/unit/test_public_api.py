"""What `raypost` exports: complete, typed, documented, and loaded only when it is used."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import raypost

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "ray", "vllm", "deepspeed", "pydantic", "numpy", "yaml")


def typed_imports() -> dict[str, str]:
    """Return the names that type checkers see, with the module of each."""
    tree = ast.parse(Path(raypost.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert len(imports) == len(block.body)
    return {alias.name: node.module or "" for node in imports for alias in node.names}


def loaded_after(code: str) -> set[str]:
    """Return the packages that a fresh interpreter has loaded after running `code`."""
    show = "import sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{show}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_type_checkers_see_the_names_that_are_exported() -> None:
    seen = typed_imports()
    assert sorted(raypost.__all__) == sorted({*seen, "__version__"})
    for name, module in seen.items():
        assert getattr(raypost, name) is getattr(sys.modules[module], name)


def test_every_exported_class_and_function_has_a_docstring() -> None:
    values = {name: getattr(raypost, name) for name in raypost.__all__}
    made = {
        name: value for name, value in values.items() if inspect.isclass(value) or inspect.isfunction(value)
    }
    assert [name for name, value in made.items() if not value.__doc__] == []
    assert sorted(values.keys() - made.keys()) == ["__version__"]


def test_every_exported_name_is_in_the_api_reference() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    assert [name for name in raypost.__all__ if f"raypost.{name}" not in page] == []


def test_importing_raypost_loads_no_dependency() -> None:
    assert loaded_after("import raypost") & set(HEAVY) == set()


def test_using_every_exported_name_loads_no_framework() -> None:
    assert (
        loaded_after("from raypost import *") & {"torch", "transformers", "ray", "vllm", "deepspeed"} == set()
    )


def test_a_name_that_is_not_exported_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = raypost.nothing  # type: ignore[attr-defined]
    assert set(raypost.__all__) <= set(dir(raypost))


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "raypost" / "py.typed").is_file()
