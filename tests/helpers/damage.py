"""Damage to the bytes of a file, for tests of readers; the same seed gives the same damage."""

from __future__ import annotations

import os
import random


def damage(data: bytes, rng: random.Random) -> bytes:
    """Return a damaged copy of a file: bytes changed, cut off, taken out, repeated or moved.

    The result differs from `data`, unless `data` is empty.

    Args:
        data: Content of a valid file.
        rng: Source of every choice.
    """
    if not data:
        return data
    damaged = data
    while damaged == data:
        for _ in range(rng.randint(1, 3)):
            damaged = rng.choice(_DAMAGES)(damaged, rng) if damaged else damaged
    return damaged


def _change_bytes(data: bytes, rng: random.Random) -> bytes:
    """Set a few bytes to values that readers of numbers stumble over, or to any value."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        changed[_place(data, rng)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    return bytes(changed)


def _flip_bit(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    changed[_place(data, rng)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _truncate(data: bytes, rng: random.Random) -> bytes:
    return data[: _place(data, rng)]


def _take_out(data: bytes, rng: random.Random) -> bytes:
    start = _place(data, rng)
    return data[:start] + data[start + rng.randint(1, 32) :]


def _repeat(data: bytes, rng: random.Random) -> bytes:
    start = _place(data, rng)
    end = start + rng.randint(1, 32)
    return data[:end] + data[start:end] + data[end:]


def _splice(data: bytes, rng: random.Random) -> bytes:
    """Continue one part of the file with another."""
    return data[: _place(data, rng)] + data[_place(data, rng) :]


def _insert_noise(data: bytes, rng: random.Random) -> bytes:
    start = _place(data, rng)
    return data[:start] + rng.randbytes(rng.randint(1, 16)) + data[start:]


def _place(data: bytes, rng: random.Random) -> int:
    """Choose a position: half of the time near the start, where the header is."""
    return rng.randrange(min(len(data), 64) if rng.random() < 0.5 else len(data))


_DAMAGES = (_change_bytes, _flip_bit, _truncate, _take_out, _repeat, _splice, _insert_noise)


def count_cases(usual: int) -> int:
    """Return the number of cases of a test with damaged files: the environment variable TTVD_FUZZ multiplies it."""
    return usual * int(os.environ.get("TTVD_FUZZ", "1"))
