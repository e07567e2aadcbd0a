"""One rank of `commrt bench`: `python -m commrt.bench OPTIONS`, where OPTIONS is the JSON that `commrt bench` made."""

from __future__ import annotations

import sys

import msgspec

from commrt.bench.options import Options
from commrt.bench.run import run_rank

if __name__ == "__main__":
    sys.exit(run_rank(msgspec.json.decode(sys.argv[1], type=Options)))
