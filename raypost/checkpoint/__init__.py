"""Checkpoints: folders that appear whole or not at all, their files, and plain state in them."""

from raypost.checkpoint.files import (
    FACTS,
    HF,
    HF_AVERAGE,
    MANIFEST,
    fsync,
    fsync_below,
    naming,
    share_weights,
    verify_files,
)
from raypost.checkpoint.folder import BEST, CHECKPOINTS, DAMAGED, LATEST, SCORES, CheckpointDir, SavePace
from raypost.checkpoint.state import EncodedState, encode_state, load_state, save_state

__all__ = [
    "BEST",
    "CHECKPOINTS",
    "DAMAGED",
    "FACTS",
    "HF",
    "HF_AVERAGE",
    "LATEST",
    "MANIFEST",
    "SCORES",
    "CheckpointDir",
    "EncodedState",
    "SavePace",
    "encode_state",
    "fsync",
    "fsync_below",
    "load_state",
    "naming",
    "save_state",
    "share_weights",
    "verify_files",
]
