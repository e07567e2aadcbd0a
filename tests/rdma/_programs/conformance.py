"""The transport's conformance suite."""

from __future__ import annotations

from commrt.testing import TransportSuite

if __name__ == "__main__":
    reasons = TransportSuite("ib").run_all()
    assert [check for check, why in reasons.items() if why] == ["memory_kinds"], reasons
    print("conformance: all passed", flush=True)
