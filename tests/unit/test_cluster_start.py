"""A private head that does not get a port is started again; one that fails otherwise is not."""

from __future__ import annotations

import pytest

from jobs.private_cluster import START_TRIES, ClusterStartError, PrivateCluster

TAKEN = "the Ray head ended with code 1; its log ends with:\nRuntimeError: [Errno 98] Address already in use"


@pytest.mark.parametrize(
    ("failures", "tries"),
    [
        ([TAKEN], 2),
        ([TAKEN] * (START_TRIES - 1), START_TRIES),
        ([TAKEN] * START_TRIES, START_TRIES),
        (["the head did not answer within 120 s"], 1),
    ],
)
def test_a_port_that_was_taken_in_between_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, failures: list[str], tries: int
) -> None:
    left, started, stopped = list(failures), [0], [0]

    def start(_: PrivateCluster) -> None:
        started[0] += 1
        if left:
            raise ClusterStartError(left.pop(0))

    def stop(_: PrivateCluster) -> None:
        stopped[0] += 1

    monkeypatch.setattr(PrivateCluster, "_start", start)
    monkeypatch.setattr(PrivateCluster, "stop", stop)
    if tries == len(failures):
        with pytest.raises(ClusterStartError):
            PrivateCluster(num_cpus=1).__enter__()
    else:
        PrivateCluster(num_cpus=1).__enter__()
    assert (started[0], stopped[0]) == (tries, len(failures))
