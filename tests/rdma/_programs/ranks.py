"""ranks.py COUNT ROLE TRANSPORT: so many ranks in each guest, as torchrun would start them.

A rank that is meant to die is not waited for by its exit status.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path


def main(count: int, role: str, transport: str) -> int:
    """Start them, and collect what became of them."""
    guest, guests = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ranks = []
    for local in range(count):
        env = {**os.environ, "RANK": str(guest * count + local), "WORLD_SIZE": str(guests * count)}
        env |= {"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(count), "COMMRT_TRANSPORT": transport}
        program = str(Path(__file__).parent / "rank.py")
        ranks.append(subprocess.Popen([sys.executable, program, role], env=env))
    codes = [rank.wait() for rank in ranks]
    return int(any(code not in (0, -signal.SIGKILL) for code in codes) or all(codes))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3]))
