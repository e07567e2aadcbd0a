"""The fake libcuda.so.1, for the real cuda-bindings."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from . import Unavailable, build

SOURCES = ("cuda_driver.cpp", "cuda_memory.cpp", "cuda_streams.cpp", "cuda_kernels.cpp", "cuda_vmm.cpp",
           "cuda_multicast.cpp")  # fmt: skip


def library() -> Path:
    """The folder that holds it. Raises Unavailable without a compiler, or without cuda.h to hold it to."""
    return build("libcuda.so.1", SOURCES, (f"-I{_headers()}",))


def _headers() -> Path:
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations if spec else None) or ()]
    found = [path for folder in folders for path in sorted(folder.glob("*/include/cuda.h"), reverse=True)]
    found += [path for path in (Path("/usr/local/cuda/include/cuda.h"),) if path.exists()]
    if not found:
        raise Unavailable("cuda.h is not here (nvidia-cuda-runtime)")
    return found[0].parent
