"""Bytes and pictures as a checkpoint holds them: compressed, with a checksum."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np


def pack(content: bytes) -> dict[str, Any]:
    """Bytes as a checkpoint holds them: compressed, `[n]` uint8, with their checksum."""
    return {"zlib": np.frombuffer(zlib.compress(content, 1), np.uint8), "crc32": zlib.crc32(content)}


def unpack(packed: dict[str, Any], limit: int) -> bytes:
    """The bytes that `pack` was given, at most `limit`; ValueError, LookupError or TypeError if they are damaged."""
    try:
        content = zlib.decompressobj().decompress(np.asarray(packed["zlib"], np.uint8).tobytes(), limit)
    except zlib.error as error:
        raise ValueError(f"the compressed state of an environment must be complete, got {error}") from error
    if zlib.crc32(content) != packed["crc32"]:
        checksum = zlib.crc32(content)
        raise ValueError(f"the state of an environment must have the checksum {packed['crc32']!r}, got {checksum}")
    return content


def unpack_like(packed: dict[str, Any], like: np.ndarray) -> np.ndarray:
    """The packed array, which must have the shape and dtype of `like`."""
    content = unpack(packed, like.nbytes + 1)
    if len(content) != like.nbytes:
        raise ValueError(f"frames must have {like.nbytes} bytes, got {len(content)}")
    return np.frombuffer(content, like.dtype).reshape(like.shape).copy()
