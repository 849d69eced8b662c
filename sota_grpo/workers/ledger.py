"""How far each open call has come, written where it can be read after the writer's end."""

from __future__ import annotations

import itertools
import os
import struct
import tempfile
import weakref

_COUNT = struct.Struct("=q")


class Ledger:
    """One number per open call in a file without a name, which the processes of this machine share.

    A worker notes how many parts of a call are done *before* it begins the next one. To note is one system call (about
    1 µs), so the number is there even when the next thing that the worker does is to crash, or to hang with the
    interpreter locked, where no answer to a ping comes any more. Nobody reads it while all goes well.

    Args:
        fd: descriptor of the file, as :attr:`fd` of the ledger that made it; None makes one, which lives as long as
            this object. A child process inherits it under the same number (``pass_fds``).

    >>> ours = Ledger()
    >>> theirs, page = Ledger(ours.fd), ours.open()
    >>> ours.read(page), theirs.note(page, 3), ours.read(page)
    (0, None, 3)
    >>> ours.free(page), ours.open() == page, ours.read(page)
    (None, True, 0)
    """

    def __init__(self, fd: int | None = None) -> None:
        self.fd = _nameless_file() if fd is None else fd
        if fd is None:  # not before: a number that is written to late must not mean another file by then
            weakref.finalize(self, os.close, self.fd)
        self._free: list[int] = []
        self._pages = itertools.count()

    def open(self) -> int:
        """A page for a call, at 0; from any thread."""
        try:
            page = self._free.pop()
        except IndexError:
            page = next(self._pages)
        self.note(page, 0)
        return page

    def note(self, page: int, done: int) -> None:
        """So many parts are done."""
        os.pwrite(self.fd, _COUNT.pack(done), page * _COUNT.size)

    def read(self, page: int) -> int:
        """What was noted last."""
        (done,) = _COUNT.unpack(os.pread(self.fd, _COUNT.size, page * _COUNT.size))
        return done

    def free(self, page: int) -> None:
        """The page may be another call's: nobody writes to it any more."""
        self._free.append(page)


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("ledger")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
