"""Puts `actors` and `jobs` into the wheel as `raypost_runtime.actors` and `raypost_runtime.jobs`.

At the top level of site-packages such names would be anybody's, and a user's own folder `jobs` would hide ours. In the
repository they stay what they are; the copies in the wheel import each other by their names there.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

RUNTIME = "raypost_runtime"
PACKAGES = ("actors", "jobs")
IMPORT = re.compile(rf"^(\s*)(from|import) ({'|'.join(PACKAGES)})\b", re.MULTILINE)
"""An import of one of them; an `import jobs` without a name after `as` would bind another name, and there is none."""
PICTURED = re.compile(rf"python -m ({'|'.join(PACKAGES)})\.")
"""The same in texts that tell the reader what to type."""


def moved(text: str) -> str:
    """Return the text of a module as it is below `raypost_runtime`."""
    return PICTURED.sub(rf"python -m {RUNTIME}.\1.", IMPORT.sub(rf"\1\2 {RUNTIME}.\3", text))


class RuntimeHook(BuildHookInterface):
    """Adds the package to the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the copies beside the repository, and name them as files of the wheel."""
        if self.target_name != "wheel" or version == "editable":
            return
        self._folder = tempfile.TemporaryDirectory()
        package = Path(self._folder.name) / RUNTIME
        for name in PACKAGES:
            for file in sorted((Path(self.root) / name).rglob("*")):
                if file.is_file() and file.suffix in (".py", ".yaml"):
                    target = package / file.relative_to(self.root)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_text(moved(file.read_text()) if file.suffix == ".py" else file.read_text())
        (package / "__init__.py").write_text('"""The actors and jobs of raypost."""\n')
        build_data["force_include"][str(package)] = RUNTIME

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the copies."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()
