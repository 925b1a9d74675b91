"""The batches that a run keeps since its last checkpoint, against what the ledger says of their steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from raypost.audit.account import Account
from raypost.audit.checkpoints import named
from raypost.audit.findings import Check, Findings
from raypost.buffer.kept import KeptBatches
from raypost.errors import CheckpointError
from raypost.types import GroupKey
from raypost.types.packed import PackedGroups


def read_batches(folder: Path, findings: Findings) -> dict[int, PackedGroups]:
    """Return the batches that are kept, by step."""
    kept, found = KeptBatches(folder), {}
    for step in kept.steps():
        try:
            found[step] = kept.read(step)
        except CheckpointError as error:
            findings.add(Check.FILES, str(error))
    return found


def check_batches(batches: dict[int, PackedGroups], account: Account, findings: Findings) -> None:
    """Check each batch, and that no group is in two of them."""
    seen: dict[GroupKey, int] = {}
    for step, packed in sorted(batches.items()):
        for key in packed.keys:
            findings.unless(
                key not in seen,
                Check.TWICE,
                f"group {named([key])} is in the batches of steps {seen.get(key)} and {step}",
            )
            seen[key] = step
        _check_groups(step, set(packed.keys), account, findings)
        _check_tokens(step, packed, account, findings)


def _check_groups(step: int, keys: set[GroupKey], account: Account, findings: Findings) -> None:
    trained = {key for key, at in account.ended.items() if at == step}
    # What the trainer left out was dropped; the last batch may not be booked yet.
    others = {
        key for key in keys - trained if account.ended.get(key, 0) > 0 or (trained and key in account.live)
    }
    findings.unless(
        not others,
        Check.BATCHES,
        f"the batch of step {step} has groups that it did not train: {named(others)}",
    )
    missing = trained - keys
    findings.unless(
        not missing,
        Check.BATCHES,
        f"the batch of step {step} lacks groups that were trained then: {named(missing)}",
    )


def _check_tokens(step: int, packed: PackedGroups, account: Account, findings: Findings) -> None:
    if step in account.steps and account.steps[step].groups == packed.num_groups:
        tokens = account.steps[step].tokens
        findings.unless(
            len(packed.response_ids) == tokens,
            Check.TOKENS,
            f"the batch of step {step} has {len(packed.response_ids)} tokens, the ledger {tokens}",
        )
    findings.unless(
        int(packed.run_versions.max(initial=-1)) < step,
        Check.VERSIONS,
        f"the batch of step {step} has tokens of version {packed.run_versions.max(initial=-1)}",
    )
    # Within a trajectory; tokens that no policy made have version -1.
    made = np.flatnonzero(packed.run_versions >= 0)
    of = np.searchsorted(packed.run_offsets, made, side="right")
    back = (np.diff(packed.run_versions[made]) < 0) & (np.diff(of) == 0)
    findings.unless(
        not back.any(),
        Check.VERSIONS,
        f"the batch of step {step} has {int(back.sum())} trajectories that go on with an older version",
    )
