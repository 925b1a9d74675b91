"""The files of one checkpoint: what they were when it was saved, what they are, and whether they are data.

Owns the manifest, and what is believed of a folder without knowing whose it is.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from safetensors import SafetensorError, safe_open

from raypost.errors import CheckpointError
from raypost.version import __version__

MANIFEST = "manifest.json"
HF, HF_AVERAGE = "hf", "hf-ema"
"""In a checkpoint: the model, and the moving average of its weights, as Hugging Face folders."""
FALLBACK = (
    "the checkpoint is damaged; checkpoint.fallback=true (or --fallback) continues from the one before it"
)
FACTS = "trainer.json"
"""What the trainer's state says of itself."""
CRITIC, PRODUCTION = "critic", "producer"
"""Beside it: the critic's state, and production's."""
DATA = (".json", ".npy", ".safetensors")
"""What the files of a checkpoint end with, outside of Hugging Face folders."""
CODE = (".bin", ".ckpt", ".joblib", ".npz", ".pickle", ".pkl", ".pt", ".pth", ".py")
"""What no file of it ends with: such files can run code when they are read."""
_STEP = re.compile(r"step-(\d+)")


def write_manifest(folder: Path, step: int, fingerprint: Mapping[str, str | int]) -> None:
    """Describe every file of the folder. May be repeated."""
    files = [file for file in files_of(folder) if file != folder / MANIFEST]
    manifest = {
        "raypost": __version__,
        "step": step,
        "fingerprint": dict(fingerprint),
        "files": {str(file.relative_to(folder)): _describe(file) for file in files},
    }
    with naming(folder / MANIFEST) as path:
        path.write_text(json.dumps(manifest, indent=1))


def verify_files(path: Path) -> int:
    """Return the step of the checkpoint `path`, of any run.

    Raises CheckpointError naming the file that is missing, damaged, unknown, or no data.
    """
    manifest = read_manifest(path)
    step: int = manifest["step"]
    if (name := _STEP.fullmatch(path.name)) and int(name.group(1)) != step:
        raise CheckpointError(f"{path / MANIFEST} is of step {step}: {FALLBACK}")
    for file, described in manifest["files"].items():
        found = _found(path / file)
        if found != described:
            state = f"is {found}, saved as {described}" if isinstance(found, dict) else found
            raise CheckpointError(f"{path / file} {state}: {FALLBACK}")
    unknown = {str(file.relative_to(path)) for file in files_of(path)} - {*manifest["files"], MANIFEST}
    if unknown:
        raise CheckpointError(
            f"{path} has files it was not saved with: {', '.join(sorted(unknown))}; remove them, if you know whose "
            "they are"
        )
    for file in files_of(path):
        _check_data(file, file.relative_to(path).parts[0] in (HF, HF_AVERAGE))
    return step


def _check_data(file: Path, is_hf: bool) -> None:
    """Raise CheckpointError unless a file is data of the kind that its name says: whatever the manifest says."""
    if file.suffix.lower() in CODE or (not is_hf and file.suffix not in DATA):
        raise CheckpointError(
            f"{file} is no file of a checkpoint of this version, which has {', '.join(DATA)} alone and runs nothing: "
            "continue with the version that saved it, or begin another run"
        )
    if is_hf:
        return
    try:
        if file.suffix == ".json":
            json.loads(file.read_text())
        elif file.suffix == ".npy":
            _check_arrays(file)
        else:
            with safe_open(str(file), "numpy") as tensors:
                tensors.keys()
    except (OSError, ValueError, EOFError, RecursionError, SafetensorError) as error:
        raise CheckpointError(f"{file} is no {file.suffix} file ({error}): {FALLBACK}") from error


def _check_arrays(file: Path) -> None:
    """Raise ValueError unless a file is arrays of plain numbers, one after the other, to its very end."""
    npy: Any = np.lib.format
    read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    with file.open("rb") as handle:
        end = handle.seek(0, os.SEEK_END)
        handle.seek(0)
        while handle.tell() < end:
            version = npy.read_magic(handle)
            if version not in read:
                raise ValueError(f"arrays of version {version}")
            shape, _, dtype = read[version](handle)
            if dtype.hasobject:
                raise ValueError("arrays of Python objects")
            if handle.seek(math.prod(shape) * dtype.itemsize, os.SEEK_CUR) > end:
                raise ValueError("cut off")


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint. Raises CheckpointError if it is no manifest."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        wanted = {name: dict(manifest[name]) for name in ("files", "fingerprint")} | {
            "step": int(manifest["step"])
        }
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path / MANIFEST} cannot be read ({error!r}): {FALLBACK}") from error
    return wanted


def contents(path: Path) -> str:
    """Return in words what a checkpoint holds; empty where it does not say."""
    try:
        facts = json.loads((path / FACTS).read_text())
        millions = sum(math.prod(shape) for shape in facts["weights"].values()) / 1e6
        ranks = f"{facts['num_workers']} rank{'s' if facts['num_workers'] != 1 else ''}"
        state = f"{millions:.3g} M weights of {facts['dtype']}, ZeRO {facts['zero_stage']} on {ranks}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""
    beside = [name for name in (CRITIC, PRODUCTION, HF, HF_AVERAGE) if any(path.glob(f"{name}*"))]
    return f"{state}; {', '.join(beside)}"


def files_of(path: Path) -> list[Path]:
    """Return all files below a folder."""
    return sorted(file for file in path.rglob("*") if file.is_file())


def _found(path: Path) -> dict[str, Any] | str:
    """Return what a file is, or what is wrong with it."""
    try:
        return _describe(path)
    except FileNotFoundError:
        return "is missing"
    except IsADirectoryError:
        return "is a folder"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"


def _describe(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_128)
    return {"bytes": path.stat().st_size, "xxh3_128": digest.hexdigest()}


@contextmanager
def naming(path: Path) -> Iterator[Path]:
    """Have an OSError that is raised inside name the file, as writing to a full disk does not."""
    try:
        yield path
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno or errno.EIO, error.strerror or str(error), str(path)) from error


def fsync(path: Path) -> None:
    """Let a file or folder survive the machine."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def fsync_below(folder: Path) -> None:
    """Let all of a folder survive the machine."""
    for path in (*folder.rglob("*"), folder):
        fsync(path)


def replace_file(path: Path, text: str) -> None:
    """Write a file durably, as a whole or not at all. Raises OSError naming it."""
    with naming(path):
        temporary = path.with_name(f"{path.name}.tmp")
        temporary.write_text(text)
        fsync(temporary)
        temporary.replace(path)
        fsync(path.parent)


def share_weights(folder: Path) -> None:
    """Let whoever reads the config.json of a Hugging Face folder read its weights; safetensors lets the owner alone."""
    for file in folder.glob("*.safetensors"):
        file.chmod((folder / "config.json").stat().st_mode)
