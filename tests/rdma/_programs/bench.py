"""`commrt bench` with two ranks in this guest. The guest's own variables look like torchrun's."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    argv = ["bench", "all_reduce", "-n", "2", "--transport", "ib", "-e", "64K", "--iters", "3", "--warmup_iters", "1"]
    os.execv(sys.executable, [sys.executable, "-m", "commrt", *argv])
