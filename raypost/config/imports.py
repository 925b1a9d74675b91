"""Objects that a configuration names as `module:name`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from raypost.errors import ConfigError


def load_object(path: str, what: str) -> Any:
    """Return the object at `module:name`. Raises ConfigError, which calls it `what`, if there is none."""
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise ConfigError(f"{what} is {path!r}, no import path: write it as module:name")
    try:
        module = importlib.import_module(module_name)
    # Importing runs the user's code, which may raise anything.
    except Exception as error:
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


def load_function(path: str, what: str) -> Callable[..., Any]:
    """Return the function at `module:name`. Raises ConfigError if there is none or it cannot be called."""
    found = load_object(path, what)
    if not callable(found):
        raise ConfigError(f"{what} is {path!r}, which is a {type(found).__name__} and no function")
    function: Callable[..., Any] = found
    return function
