"""A prompt on a terminal, with everything visible that an engine reads: special tokens, ends of lines, odd spaces."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from rich.text import Text

SPECIAL, HIDDEN = "bold magenta", "bold cyan"
"""Styles of special tokens, and of the signs that stand for what one does not see."""


_UNSEEN = re.compile(
    r" +(?=\n|$)|[^\S ]|[\x00-\x1f\x7f-\xa0\xad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]"
)
"""Spaces before an end, other white space, and characters that control or show nothing."""


def prompt_text(text: str, special_tokens: Sequence[str] = ()) -> Text:
    """Return the text with its special tokens marked, and signs for characters that show nothing.

    A line's end is ⏎, a tab ⇥, spaces before a line's end or the text's are ·, other such characters their code point.
    """
    shown = Text()
    tokens = sorted(filter(None, special_tokens), key=len, reverse=True)
    pieces = re.split("(" + "|".join(map(re.escape, tokens)) + ")", text) if tokens else [text]
    for number, piece in enumerate(pieces):
        if number % 2:
            shown.append(piece, SPECIAL)
        else:
            _append(shown, piece)
    return shown


def _append(shown: Text, piece: str) -> None:
    at = 0
    for found in _UNSEEN.finditer(piece):
        shown.append(piece[at : found.start()])
        shown.append(_sign(found.group()), HIDDEN)
        at = found.end()
    shown.append(piece[at:])


def _sign(unseen: str) -> str:
    if unseen[0] == " ":
        return "·" * len(unseen)
    known = {"\n": "⏎\n", "\t": "⇥\t"}
    return known.get(unseen) or f"⟨{unicodedata.name(unseen, f'U+{ord(unseen):04X}')}⟩"
