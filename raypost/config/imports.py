"""Objects that a configuration names as `module:name`, or as `FILE.py:name` with the text of the file."""

from __future__ import annotations

import hashlib
import importlib
import linecache
import sys
import types
from collections.abc import Callable
from typing import Any

from raypost.errors import ConfigError


def load_object(path: str, what: str, source: str | None = None) -> Any:
    """Return the object at `module:name`, or in the file whose text is `source`.

    Raises ConfigError, which calls it `what`, if there is none.
    """
    module_name, colon, name = path.rpartition(":")
    if not colon or not module_name or not name:
        raise ConfigError(f"{what} is {path!r}, no import path: write it as module:name")
    try:
        module = importlib.import_module(module_name) if source is None else _module_of(module_name, source)
    # Importing runs the user's code, which may raise anything, and even leave.
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{what} is {path!r}, but importing {module_name} failed with {type(error).__name__}: {error}; the "
            "module must lie in the folder that the job was submitted from, or be installed"
        ) from error
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{what} is {path!r}, but {module_name} has no {name!r}")
        found = getattr(found, part)
    return found


def _module_of(path: str, source: str) -> types.ModuleType:
    name = f"raypost_file_{hashlib.sha256(source.encode()).hexdigest()[:12]}"
    if name not in sys.modules:
        module = types.ModuleType(name)
        module.__file__ = path
        # Tracebacks then show its lines, on nodes that do not have the file.
        linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
        exec(compile(source, path, "exec"), module.__dict__)
        sys.modules[name] = module
    return sys.modules[name]


def load_function(path: str, what: str, source: str | None = None) -> Callable[..., Any]:
    """Return the function at `module:name`, as `load_object`. Raises ConfigError if it cannot be called."""
    found = load_object(path, what, source)
    if not callable(found):
        raise ConfigError(f"{what} is {path!r}, which is a {type(found).__name__} and no function")
    function: Callable[..., Any] = found
    return function
