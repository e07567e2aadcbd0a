"""Writes the C source of the cffi module from api.h. Run by CMake: `python ffi_build.py api.h OUTPUT.c`."""

from __future__ import annotations

import sys
from pathlib import Path

import cffi


def main(header: str, output: str) -> None:
    """Declare exactly what api.h and callbacks.h declare between their marks."""
    ffi = cffi.FFI()
    for source in (Path(header), Path(header).parent / "callbacks.h"):
        ffi.cdef(source.read_text().split("// CDEF BEGIN")[1].split("// CDEF END")[0])
    ffi.set_source("commrt._native._core", '#include "api.h"\n')
    ffi.emit_c_code(output)


if __name__ == "__main__":
    main(*sys.argv[1:])
