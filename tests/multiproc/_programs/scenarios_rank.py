"""A rank that runs every scenario of asynchrony."""

from __future__ import annotations

import commrt
from commrt.testing import scenarios

with commrt.init(timeout=20) as comm:
    for scenario in scenarios.ASYNCHRONY:
        scenario(comm)
        print(f"{scenario.__name__} right")
