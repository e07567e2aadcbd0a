"""Writes the C source of the cffi module from C headers. Run by CMake: `python ffi_build.py HEADER.h ... OUTPUT.c`."""

from __future__ import annotations

import sys
from pathlib import Path

import cffi


def main(*paths: str) -> None:
    """Declare exactly what the headers, and callbacks.h beside them, declare between their marks."""
    headers, output = [Path(path) for path in paths[:-1]], paths[-1]
    ffi = cffi.FFI()
    for source in (*headers, headers[0].parent / "callbacks.h"):
        ffi.cdef(source.read_text().split("// CDEF BEGIN")[1].split("// CDEF END")[0])
    ffi.set_source("commrt._native._core", "".join(f'#include "{header.name}"\n' for header in headers))
    ffi.emit_c_code(output)


if __name__ == "__main__":
    main(*sys.argv[1:])
