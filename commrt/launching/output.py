"""The ranks' outputs, passed on line by line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import IO, BinaryIO

MAX_LINE = 1 << 20


@dataclass
class Stream:
    """One output of one rank, cut into lines."""

    pipe: IO[bytes]
    head: bytes
    sink: BinaryIO
    pending: bytearray = field(default_factory=bytearray)


class Output:
    """Passes lines on, whole. A reader that went away is remembered, not raised."""

    def __init__(self, stdout: BinaryIO, stderr: BinaryIO, prefix: bool) -> None:
        self.stdout, self.stderr, self._prefix = stdout, stderr, prefix
        self.broken = False

    def stream(self, rank: int, pipe: IO[bytes], sink: BinaryIO) -> Stream:
        return Stream(pipe, b"[%d] " % rank if self._prefix else b"", sink)

    def feed(self, stream: Stream, data: bytes) -> None:
        stream.pending += data
        whole = stream.pending.rfind(b"\n") + 1
        if not whole and len(stream.pending) > MAX_LINE:
            self.finish(stream)
        elif whole:
            lines = bytes(stream.pending[:whole])
            del stream.pending[:whole]
            self._write(stream.sink, b"".join(stream.head + line for line in lines.splitlines(keepends=True)))

    def finish(self, stream: Stream) -> None:
        """What is left of a last line without an end."""
        if stream.pending:
            self._write(stream.sink, stream.head + bytes(stream.pending) + b"\n")
            stream.pending.clear()

    def say(self, line: str) -> None:
        self._write(self.stderr, line.encode() + b"\n")

    def _write(self, sink: BinaryIO, data: bytes) -> None:
        try:
            sink.write(data)
            sink.flush()
        except (BrokenPipeError, ValueError):
            self.broken = True
