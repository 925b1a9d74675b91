"""Finds, in source text, waits that nothing bounds: by syntax alone, so a wait needs a timeout where it stands."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

BOUNDS = {"timeout", "timeout_at", "within", "wait_for"}
"""Calls that give what they contain a deadline."""
BLOCKING = {
    "wait",
    "join",
    "communicate",
    "acquire",
    "get",
    "drain",
    "remote",
    "flock",
    "select",
    "urlopen",
    "run",
}


def unbounded(file: Path) -> Iterator[tuple[str, str]]:
    """Yield (function, text) of each wait without a deadline."""
    yield from _in(ast.parse(file.read_text()), "", False)


def _in(node: ast.AST, inside: str, bounded: bool) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        name, bound = inside, bounded
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name, bound = f"{inside}.{child.name}".lstrip("."), False
        elif isinstance(child, ast.AsyncWith | ast.With):
            bound = bounded or any(_bounds(item.context_expr) for item in child.items)
        elif isinstance(child, ast.Call) and _bounds(child):
            bound = True
        if not bound and _waits(child):
            yield name, ast.unparse(child)
        yield from _in(child, name, bound)


def _bounds(node: ast.expr) -> bool:
    """Whether this call gives its block, or its arguments, a deadline that is not None; so does a name that says so."""
    if isinstance(node, ast.Name):
        return node.id == "deadline"
    if not isinstance(node, ast.Call) or _called(node) not in BOUNDS:
        return False
    return not any(isinstance(arg, ast.Constant) and arg.value is None for arg in node.args)


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _waits(node: ast.AST) -> bool:
    if isinstance(node, ast.Await):
        # What is awaited is a ref, a task or a future; a call of a coroutine function is looked at where that stands.
        return not isinstance(node.value, ast.Call) or _called(node.value) == "remote"
    if not isinstance(node, ast.Call):
        return False
    if any(keyword.arg in ("timeout", "timeout_s") for keyword in node.keywords):
        return False
    match _called(node):
        case "wait":
            # asyncio.wait(tasks), event.wait(), process.wait(): with a number they end by themselves.
            return not node.args or ast.unparse(node.func) == "asyncio.wait"
        case "get":
            # In capitals it is a context variable.
            of = ast.unparse(node.func)
            return of == "ray.get" or not (node.args or node.keywords or of.split(".")[0].isupper())
        case "join":
            return not node.args and not node.keywords
        case "acquire" | "communicate":
            return not node.args
        case "flock":
            return "LOCK_NB" not in ast.unparse(node)
        case "select":
            return len(node.args) < 4
        case "run":
            return ast.unparse(node.func) == "subprocess.run"
        case "urlopen":
            return True
    return False
