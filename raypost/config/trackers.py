"""Where metrics go beside the run folder's own files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Literal

TrackerKind = Literal["tensorboard", "wandb", "trackio", "mlflow"]

MODULES: dict[TrackerKind, tuple[str, ...]] = {
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
}
"""What a tracker imports; the extra of its name installs them."""


def tracker_problems(kinds: Sequence[TrackerKind]) -> Iterator[str]:
    """Yield why these trackers cannot work here."""
    for kind in dict.fromkeys(kinds):
        if missing := [module for module in MODULES[kind] if find_spec(module) is None]:
            yield (
                f"trackers has {kind!r}, but {' and '.join(missing)} cannot be imported here: "
                f"pip install 'raypost[{kind}]', or leave it out"
            )
    if len(set(kinds)) < len(kinds):
        yield f"trackers names one twice: {list(kinds)}"
