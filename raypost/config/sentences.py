"""What each field means: the text below it in the source, for pages about the configuration."""

from __future__ import annotations

import ast
import inspect
import itertools

from pydantic import BaseModel


def field_sentences(model: type[BaseModel]) -> dict[str, str]:
    """Return the text below each field, inherited ones included; a field without one is left out.

    Every process imports the configuration and few ask for its texts: reading them for all models at import, as
    pydantic can, would take a quarter of that import.
    """
    found: dict[str, str] = {}
    for part in reversed(model.__mro__[: model.__mro__.index(BaseModel)]):
        (read,) = ast.parse(inspect.getsource(part)).body
        assert isinstance(read, ast.ClassDef)
        for field, below in itertools.pairwise(read.body):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                text = ast.literal_eval(below.value)
                found[ast.unparse(field.target)] = " ".join(str(text).split())
    return found
