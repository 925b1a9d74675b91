"""What the ledger knows of a group beside where it is: figures while it lives, a record of fixed length at its end.

Owns the figures, the record and how it reads as lines of the journal again. A record has what the life of a group
comes to: when it was sampled, stored last, leased and ended; how; at which step and staleness; the range and the mean
of its response lengths and rewards; the versions of its tokens; who generated it last; how often it was interrupted,
continued, and generated again. What each of its members had is not in it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from raypost.ledger.events import DROPPED, LedgerEvent
from raypost.types import GroupKey, Status

Fields = dict[str, Any]

MAX_NAMES = 4096
"""Different texts (tasks, engines, reasons) that records can name."""
OTHER = "(one of too many different texts: the log has it)"
"""Stands for the texts beyond that."""


class GroupPlace(StrEnum):
    """Where a group that has not ended is."""

    IN_FLIGHT = "in_flight"
    BUFFERED = "buffered"
    LEASED = "leased"


class Names:
    """Texts by number: records are short because they name texts so."""

    def __init__(self, texts: list[str] | None = None) -> None:
        """Begin with these texts; number 0 is the empty one."""
        self.texts = list(texts or ("", OTHER))
        self._numbers = {text: number for number, text in enumerate(self.texts)}

    def number(self, text: str) -> int:
        """Return the number of a text, a new one if need be."""
        if text not in self._numbers:
            if len(self.texts) >= MAX_NAMES:
                return self._numbers[OTHER]
            self._numbers[text] = len(self.texts)
            self.texts.append(text)
        return self._numbers[text]


@dataclass(slots=True)
class GroupStats:
    """Groups of one kind; means are over those of which the journal has the figure, None without any."""

    groups: int = 0
    tokens_sum: float = 0.0
    tokens_groups: int = 0
    staleness_sum: float = 0.0
    staleness_groups: int = 0

    def add(self, group: LiveGroup) -> None:
        """Count one group with the mean response length of its members, and its staleness."""
        self.groups += 1
        if group.members:
            self.tokens_sum += group.tokens / group.members
            self.tokens_groups += 1
        if group.staleness is not None:
            self.staleness_sum += group.staleness
            self.staleness_groups += 1

    @property
    def tokens_mean(self) -> float | None:
        """Mean response length."""
        return self.tokens_sum / self.tokens_groups if self.tokens_groups else None

    @property
    def staleness_mean(self) -> float | None:
        """Mean staleness."""
        return self.staleness_sum / self.staleness_groups if self.staleness_groups else None

    def as_dict(self) -> Fields:
        """Return plain data."""
        return {"groups": self.groups, "tokens_mean": self.tokens_mean, "staleness_mean": self.staleness_mean}

    def __iadd__(self, other: GroupStats) -> GroupStats:
        """Add the groups of another kind."""
        for name in GroupStats.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self


@dataclass(slots=True)
class LiveGroup:
    """A group that has not ended. Times are seconds since the epoch, 0 for what did not happen."""

    place: GroupPlace = GroupPlace.IN_FLIGHT
    step: int = 0
    """Step it was leased for last."""
    sampled_s: float = 0.0
    stored_s: float = 0.0
    leased_s: float = 0.0
    status: str = ""
    """Under which it was stored last."""
    staleness: int | None = None
    members: int = 0
    """Members whose response lengths are known; `tokens` is their sum, `tokens_low` and `tokens_high` their range."""
    tokens: int = 0
    tokens_low: int = 0
    tokens_high: int = 0
    oldest: int = 0
    """Version of the oldest token that a policy produced, as `newest` of the newest."""
    newest: int = 0
    rewarded: int = 0
    """Members whose reward is known; the mean and the range of these rewards follow."""
    reward: float = 0.0
    reward_low: float = 0.0
    reward_high: float = 0.0
    engine: str = ""
    """Of its last tokens; the first by name where several made them."""
    aborts: int = 0
    continued: int = 0
    """How often it left the buffer to be generated further."""
    regenerated: int = 0
    """How often it grew too old and stayed."""
    is_expired: bool = False
    is_continued: bool = False

    def learn(self, facts: Mapping[str, Any]) -> None:
        """Update the figures from the facts of a line (`ledger.group_facts`); what is not in there stays."""
        tokens = facts.get("tokens", ())
        if len(tokens):
            self.members, self.tokens = len(tokens), int(sum(tokens))
            self.tokens_low, self.tokens_high = int(min(tokens)), int(max(tokens))
        if versions := [int(one) for one in facts.get("versions", ()) if int(one) >= 0]:
            self.oldest, self.newest = min(versions), max(versions)
        if rewards := [one for one in facts.get("rewards", ()) if one is not None]:
            self.rewarded, self.reward = len(rewards), sum(rewards) / len(rewards)
            self.reward_low, self.reward_high = min(rewards), max(rewards)
        if engines := facts.get("engines"):
            self.engine = str(engines[0])
        self.aborts = facts.get("aborts", self.aborts)
        self.staleness = facts.get("staleness", self.staleness)


# ---------------------------------------------------------------- records

_FORMAT = {
    "group": "q", "sampled_s": "d", "stored_s": "f", "leased_s": "f", "ended_s": "f", "step": "i", "staleness": "i",
    "tokens": "i", "tokens_low": "i", "tokens_high": "i", "oldest": "i", "newest": "i",
    "reward": "f", "reward_low": "f", "reward_high": "f",
    "members": "H", "rewarded": "H", "aborts": "H", "continued": "H", "regenerated": "H",
    "task": "H", "engine": "H", "why": "H", "where": "B", "status": "B", "flags": "B",
}  # fmt: skip
"""Fields of a record. `stored_s`, `leased_s` and `ended_s` count from `sampled_s`; texts are numbers of Names."""
RECORD = struct.Struct("<" + "".join(_FORMAT.values()))
_COUNTS = [name for name, kind in _FORMAT.items() if kind == "H"]
RECORD_TYPE = np.dtype([(name, f"<{kind}") for name, kind in _FORMAT.items()])
"""The same for many records at once."""
WHERE: tuple[str, ...] = (*GroupPlace, LedgerEvent.TRAINED, *DROPPED)
"""What the number in `where` stands for."""
_STATUSES: tuple[str, ...] = ("", *Status)
_NOT_KNOWN = -(2**31)
_EXPIRED, _CONTINUED = 1, 2
_SAME = ("step", "tokens", "tokens_low", "tokens_high", "oldest", "newest", "reward", "reward_low", "reward_high",
         "members", "rewarded", "aborts", "continued", "regenerated")  # fmt: skip
"""Fields that a LiveGroup has under the same name."""


def record_of(
    key: GroupKey, group: LiveGroup, names: Names, end: str = "", ended_s: float = 0.0, why: str = ""
) -> bytes:
    """Return the record of a group, RECORD.size bytes; without `end` it lives."""
    fields: Fields = {name: getattr(group, name) for name in _SAME}
    since = {"stored_s": group.stored_s, "leased_s": group.leased_s, "ended_s": ended_s}
    fields |= {name: at - group.sampled_s if at else math.nan for name, at in since.items()}
    fields |= {
        "group": key[1],
        "sampled_s": group.sampled_s,
        "staleness": _NOT_KNOWN if group.staleness is None else group.staleness,
        "task": names.number(key[0]),
        "engine": names.number(group.engine),
        "why": names.number(why),
        "where": WHERE.index(end or group.place),
        "status": _STATUSES.index(group.status),
        "flags": _EXPIRED * group.is_expired + _CONTINUED * group.is_continued,
    }
    for name in _COUNTS:
        fields[name] = min(fields[name], 0xFFFF)
    return RECORD.pack(*(fields[name] for name in _FORMAT))


def group_of(record: bytes, names: Names) -> tuple[GroupKey, LiveGroup]:
    """Return the living group that a record was made of."""
    fields = _fields(record)
    group = LiveGroup(GroupPlace(WHERE[fields["where"]]), **{name: fields[name] for name in _SAME})
    group.sampled_s = fields["sampled_s"]
    group.stored_s, group.leased_s = (
        0.0 if math.isnan(fields[name]) else group.sampled_s + fields[name]
        for name in ("stored_s", "leased_s")
    )
    group.staleness = None if fields["staleness"] == _NOT_KNOWN else fields["staleness"]
    group.engine, group.status = names.texts[fields["engine"]], _STATUSES[fields["status"]]
    group.is_expired, group.is_continued = (bool(fields["flags"] & flag) for flag in (_EXPIRED, _CONTINUED))
    return (names.texts[fields["task"]], fields["group"]), group


def lines_of(record: bytes, names: Names) -> list[Fields]:
    """Return what a record says as lines of the journal: sampled, stored, leased, and the end if there is one."""
    fields = _fields(record)
    key = {"task": names.texts[fields["task"]], "group": fields["group"]}
    where, sampled_s = WHERE[fields["where"]], fields["sampled_s"]
    lines = [{"time": sampled_s, "event": str(LedgerEvent.SAMPLED), **key}]
    known: Fields = {"compact": _figures(fields, names)}
    if not math.isnan(fields["stored_s"]):
        status = _STATUSES[fields["status"]]
        time_s = sampled_s + fields["stored_s"]
        lines.append({"time": time_s, "event": str(LedgerEvent.STORED), **key, "status": status, **known})
        known = {}
    staleness = {} if fields["staleness"] == _NOT_KNOWN else {"staleness": fields["staleness"]}
    if not math.isnan(fields["leased_s"]):
        time_s = sampled_s + fields["leased_s"]
        leased = {
            "time": time_s,
            "event": str(LedgerEvent.LEASED),
            **key,
            "step": fields["step"],
            **staleness,
        }
        lines.append(leased)
    if where == LedgerEvent.TRAINED:
        lines.append({"time": sampled_s + fields["ended_s"], "event": where, **key, "step": fields["step"]})
    elif where in DROPPED:
        why = {"why": names.texts[fields["why"]]} if fields["why"] else {}
        time_s = sampled_s + fields["ended_s"]
        lines.append({"time": time_s, "event": str(where), **key, **why, **staleness, **known})
    return lines


def _fields(record: bytes) -> Fields:
    return dict(zip(_FORMAT, RECORD.unpack(record), strict=True))


def _figures(fields: Fields, names: Names) -> Fields:
    """Return the figures of a record that it has, by name."""
    found: Fields = {name: fields[name] for name in ("aborts", "continued", "regenerated") if fields[name]}
    if fields["engine"]:
        found["engine"] = names.texts[fields["engine"]]
    if fields["members"]:
        mean = fields["tokens"] / fields["members"]
        found |= {
            "responses": fields["members"],
            "tokens": [fields["tokens_low"], mean, fields["tokens_high"]],
        }
        found["versions"] = [fields["oldest"], fields["newest"]]
    if fields["rewarded"]:
        found["rewards"] = [fields["reward_low"], fields["reward"], fields["reward_high"]]
    return found
