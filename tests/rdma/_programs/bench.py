"""`commrt bench` on every guest as a node, with two ranks each. The guest's own variables look like torchrun's."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    node, nodes, address = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    argv = ["bench", "all_reduce", "-n", "2", "--transport", "ib", "-e", "32K", "--iters", "3", "--warmup_iters", "1"]
    argv += ["--nodes", nodes, "--node-rank", node, "--rendezvous", f"{address}:29511"]
    os.execv(sys.executable, [sys.executable, "-m", "commrt", *argv])
