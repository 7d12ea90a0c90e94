"""PNG files, for language models that see."""

from __future__ import annotations

import struct
import zlib

import numpy as np


def encode_png(pixels: np.ndarray) -> bytes:
    r"""Return pixels as a PNG file.

    Args:
        pixels: uint8 ``[rows, columns, 3]``, red, green and blue.
    """
    rows, columns, _ = pixels.shape
    # Each row begins with its filter; 0 is none.
    lines = np.zeros((rows, 1 + 3 * columns), dtype=np.uint8)
    lines[:, 1:] = pixels.reshape(rows, -1)
    header = struct.pack(">IIBBBBB", columns, rows, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b""))
    body = b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body
