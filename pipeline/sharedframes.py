"""Pictures in memory shared by two processes, with nothing to clean up.

The memory has no name (memfd on Linux, an unlinked temporary file elsewhere): it goes when the last process that holds
it goes, however that one dies.
"""

from __future__ import annotations

import mmap
import os
import tempfile

import numpy as np
import numpy.typing as npt

SLOTS = 3
_HEADER_BYTES = 4096


class SharedFrames:
    """A ring of `SLOTS` pictures written by one process and read by others, without locks.

    Frame `index` lies in slot `index % SLOTS`. A slot carries the index of its picture, -1 while it is being written;
    a reader copies and then looks whether the index is still the same. Pages that are never touched cost nothing, so
    the slots can be as large as the largest picture allowed.

    Args:
        slot_bytes: The largest picture, height * width * 3.
        fd: The memory to join; None makes a new one, whose `fd` is to be passed on to the other process.
    """

    def __init__(self, slot_bytes: int, fd: int | None = None) -> None:
        self.slot_bytes = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        size = _HEADER_BYTES + SLOTS * self.slot_bytes
        if fd is None:
            if hasattr(os, "memfd_create"):
                fd = os.memfd_create("framechat-frames", os.MFD_CLOEXEC)
            else:
                with tempfile.TemporaryFile() as file:
                    fd = os.dup(file.fileno())
            os.ftruncate(fd, size)
        self.fd = fd
        self._memory = mmap.mmap(fd, size)
        self._indices = np.ndarray((SLOTS,), dtype=np.int64, buffer=self._memory)

    def slot(self, index: int, shape: tuple[int, int, int]) -> npt.NDArray[np.uint8]:
        """The memory of frame `index`, as a picture of `shape` (H, W, 3)."""
        offset = _HEADER_BYTES + (index % SLOTS) * self.slot_bytes
        return np.ndarray(shape, dtype=np.uint8, buffer=self._memory, offset=offset)

    def fits(self, shape: tuple[int, int, int]) -> bool:
        """Whether a picture of this shape has room."""
        return shape[0] * shape[1] * shape[2] <= self.slot_bytes

    def write(self, index: int, image: npt.NDArray[np.uint8]) -> None:
        """Put a (H, W, 3) picture into its slot."""
        height, width, channels = image.shape
        self._indices[index % SLOTS] = -1
        np.copyto(self.slot(index, (height, width, channels)), image)
        self._indices[index % SLOTS] = index

    def read(self, index: int, shape: tuple[int, int, int]) -> npt.NDArray[np.uint8] | None:
        """A copy of frame `index`; None when a newer one has taken, or is taking, its slot."""
        if int(self._indices[index % SLOTS]) != index:
            return None
        copy = self.slot(index, shape).copy()
        return copy if int(self._indices[index % SLOTS]) == index else None

    def clear(self) -> None:
        """Forget what is in the ring (its writer died and another begins at the same index)."""
        self._indices[:] = -1

    def close(self) -> None:
        """Give up this process's hold on the memory; copies that `read` made stay valid."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
