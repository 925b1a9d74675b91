"""Files of JSON lines: what a line ends with finds each bit that flips, and what was cut off is no damage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raypost.errors import RunFilesError
from raypost.files.jsonl import LineFile, parsed, read_lines, sealed

LINES = [
    '{"event": "note", "n": 1, "text": "a\\u00e4\\u2028 \\"crc\\""}',
    "{}",
    '{"n": 1.5, "of": {"crc": "x"}}',
]


def test_a_line_is_a_json_object_and_comes_back_without_its_checksum(tmp_path: Path) -> None:
    LineFile(tmp_path / "lines").append(LINES)
    written = (tmp_path / "lines").read_text().splitlines()
    assert [json.loads(line).pop("crc") == line[-10:-2] for line in written] == [True] * 3
    assert list(read_lines(tmp_path / "lines")) == [json.loads(line) for line in LINES]


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    LineFile(path).append(LINES)
    whole = path.read_bytes()
    for bit in range(
        8 * (len(whole) - 1)
    ):  # without the last newline, the file ends in a line that was cut off
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        with pytest.raises(
            RunFilesError, match=r"lines is damaged: line \d, at byte \d+: .*remove that line"
        ):
            list(read_lines(path))


@pytest.mark.parametrize("line", [b"", b"{}", b"[]", b'{"crc": "00000000"}', b"\xff\x00", b"[" * 100_000])
def test_what_nobody_sealed_is_no_line(line: bytes) -> None:
    with pytest.raises(ValueError, match="checksum"):
        parsed(line)


@pytest.mark.parametrize("rest", [b"{", LINES[0][:20].encode(), b"\0" * 4096, b'{"n": 3' + b"\0" * 9])
def test_a_line_that_was_cut_off_is_no_damage(tmp_path: Path, rest: bytes) -> None:
    path = tmp_path / "lines"
    path.write_bytes(sealed('{"n": 1}').encode() + rest)
    assert list(read_lines(path)) == [{"n": 1}]


@pytest.mark.parametrize("garbage", [b"\x7fELF" * 100, b"no line of ours", b"{\xff", b"\0\1"])
def test_what_no_line_could_begin_with_is_damage(tmp_path: Path, garbage: bytes) -> None:
    path = tmp_path / "lines"
    path.write_bytes(garbage)
    with pytest.raises(RunFilesError, match="line 1, at byte 0, is no text: remove that line, or the file"):
        list(read_lines(path))
