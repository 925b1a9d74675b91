"""A model's name becomes a local Hugging Face folder.

Owns the names raypost knows (`tiny`, `smollm2-135m`), the cache of what it made, and the fast checks made
before anything starts. Importing it loads no torch.

Invariant: a folder in the cache is complete. It is built beside its place and moved there in one rename.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from raypost.config import ModelConfig
from raypost.errors import ConfigError
from raypost.models import smollm2, tiny
from raypost.models.folder_check import check_folder

log = logging.getLogger(__name__)

TINY = "tiny"
SMOLLM2 = "smollm2-135m"


def check_model(model: ModelConfig) -> None:
    """Check what can be checked without torch and in under a second. Raises ConfigError."""
    if model.name == TINY:
        tiny.TinyRecipe.from_options(model.options)
        return
    if model.options:
        raise ConfigError(
            f"model.options {sorted(model.options)} belong to the model 'tiny', not {model.name!r}"
        )
    if model.name == SMOLLM2:
        # A converted copy is enough; without one the weights must come out of the installed package.
        if not _smollm2_folder(model.cache_dir).is_dir():
            smollm2.find_gguf()
        return
    folder = Path(model.name).expanduser()
    if folder.is_dir():
        check_folder(folder)
    elif _looks_like_path(model.name):
        raise ConfigError(f"model folder {folder} does not exist: give a Hugging Face folder, or 'tiny'")
    elif (found := hub_folder(model.name)) is not None:
        check_folder(found, weights=False)
    elif "/" not in model.name:
        raise ConfigError(
            f"model {model.name!r} is neither a folder nor {TINY!r} nor {SMOLLM2!r}: give a Hugging Face folder, or a "
            "hub id, OWNER/NAME"
        )


def hub_folder(hub_id: str) -> Path | None:
    """Return the folder of a model of which the tokenizer, at least, was fetched from the hub; None for no such."""
    try:
        from huggingface_hub import try_to_load_from_cache

        file = try_to_load_from_cache(hub_id, "config.json")
    except ValueError:  # what the hub's library raises for a name that is no id
        return None
    return (
        Path(file).parent
        if isinstance(file, str) and (Path(file).parent / "tokenizer.json").is_file()
        else None
    )


def resolve_model(model: ModelConfig, seed: int, cache_dir: Path) -> Path:
    """Return the folder of `model`: made, converted or fetched from the hub if need be.

    `seed` matters to `tiny` alone. May take a minute the first time. Raises ConfigError.
    """
    check_model(model)
    if model.name == TINY:
        recipe = tiny.TinyRecipe.from_options(model.options)
        return cached(
            _tiny_folder(recipe, seed, cache_dir), lambda folder: tiny.make_tiny(recipe, seed, folder)
        )
    if model.name == SMOLLM2:
        return cached(_smollm2_folder(cache_dir), smollm2.convert)
    folder = Path(model.name).expanduser()
    return folder.resolve() if folder.is_dir() else _fetch(model.name)


def made_folder(model: ModelConfig, seed: int) -> Path | None:
    """Return where a model that raypost makes was made before; None for another model, or one that is not there."""
    if model.name == TINY:
        folder = _tiny_folder(tiny.TinyRecipe.from_options(model.options), seed, model.cache_dir)
    elif model.name == SMOLLM2:
        folder = _smollm2_folder(model.cache_dir)
    else:
        return None
    return folder if folder.is_dir() else None


def _fetch(hub_id: str) -> Path:
    """Fetch the hub's snapshot of `hub_id` into the hub's own cache, which HF_HOME moves."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(hub_id, allow_patterns=["*.json", "*.safetensors", "*.model", "*.jinja"])
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"model {hub_id!r} cannot be fetched from the Hugging Face hub ({type(error).__name__}: {error}); give "
            "a local folder, or check the id, the network and HF_TOKEN"
        ) from error


def _tiny_folder(recipe: tiny.TinyRecipe, seed: int, cache_dir: Path) -> Path:
    text = json.dumps([tiny.REVISION, seed, dataclasses.asdict(recipe)], sort_keys=True)
    return cache_dir.expanduser() / f"tiny-{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"


def _smollm2_folder(cache_dir: Path) -> Path:
    return cache_dir.expanduser() / f"{SMOLLM2}-r{smollm2.REVISION}"


def _looks_like_path(name: str) -> bool:
    # A hub id is "name" or "owner/name".
    return name.startswith(("/", "./", "../", "~")) or name.count("/") > 1


def cached(target: Path, make: Callable[[Path], None]) -> Path:
    """Return `target`, made by `make` if it does not exist. Of two made at once, one is kept."""
    if target.is_dir():
        log.info("model: taken from %s", target)
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise ConfigError(
            f"cannot write into model.cache_dir {target.parent}: {error.strerror}; set another one"
        ) from error
    try:
        log.info("model: making %s, once", target)
        make(building)
        building.chmod(0o755)
        for weights in building.glob("*.safetensors"):
            weights.chmod(0o644)  # which safetensors lets the owner alone read
        try:
            building.rename(target)
        except OSError:
            # Someone else finished first: a directory cannot be renamed onto a full one.
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target
