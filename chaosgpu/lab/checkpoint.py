"""A rank's checkpoint on disk: written past the page cache, replaced by rename, checked when read.

O_DIRECT and O_DSYNC, as checkpoint libraries for large models offer: the write ends when the device has the bytes, and
both generations of the kernel's block throttling see it (the blkio controller of cgroup v1 does not see the write-back
of cached pages: Documentation/admin-guide/cgroup-v1/blkio-controller.rst).
"""

import mmap
import os
import struct
import zlib
from array import array
from pathlib import Path

from chaosgpu.lab.model import Model

BLOCK_BYTES = 4096
CHUNK_BYTES = 128 * 1024
HEADER = struct.Struct("<8sQII")  # magic, step, CRC-32 of the body, body bytes
MAGIC = b"LABCKPT1"


class Checkpoint:
    """One rank's checkpoint file in a directory."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory = directory
        self._path = directory / f"rank{rank}.ckpt"

    def save(self, step: int, model: Model) -> None:
        """Write and put in place; OSError (ENOSPC, EIO) when the volume does not take it, the old file then stays."""
        body = model.weights.tobytes() + model.squares.tobytes()
        size = -(-(BLOCK_BYTES + len(body)) // BLOCK_BYTES) * BLOCK_BYTES
        new = self._path.with_suffix(".new")
        # Anonymous mappings begin at a page, as O_DIRECT asks of the buffer.
        with mmap.mmap(-1, size) as buffer:
            HEADER.pack_into(buffer, 0, MAGIC, step, zlib.crc32(body), len(body))
            buffer[BLOCK_BYTES : BLOCK_BYTES + len(body)] = body
            with memoryview(buffer) as view:
                file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT | os.O_DSYNC, 0o600)
                try:
                    written = 0
                    while written < size:
                        with view[written : written + CHUNK_BYTES] as chunk:
                            written += os.write(file, chunk)
                finally:
                    os.close(file)
        os.rename(new, self._path)
        directory = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def load(self, model: Model) -> int:
        """Fill the model and return its step; 0, with the model untouched, where there is no whole checkpoint."""
        try:
            content = self._path.read_bytes()
        except OSError:
            return 0
        if len(content) < BLOCK_BYTES:
            return 0
        magic, step, checksum, size = HEADER.unpack_from(content)
        body = content[BLOCK_BYTES : BLOCK_BYTES + size]
        if magic != MAGIC or size != 2 * 8 * len(model.weights) or zlib.crc32(body) != checksum:
            return 0
        model.weights = array("d", body[: size // 2])
        model.squares = array("d", body[size // 2 :])
        return int(step)
