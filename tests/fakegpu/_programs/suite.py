"""suite.py backend|transport NAME: one line of JSON with what each check of its conformance suite came to."""

from __future__ import annotations

import json
import sys

from commrt.testing import BackendSuite, TransportSuite
from commrt.testing._conformance import ConformanceError, Suite


def suite(kind: str, name: str, backend: str) -> Suite:
    return BackendSuite(name) if kind == "backend" else TransportSuite(name, backend=backend)


def outcome(checks: Suite, name: str) -> tuple[str, str]:
    try:
        reason = checks.run(name)
    except ConformanceError as error:
        return "failed", str(error)
    return ("passed", "") if reason is None else ("skipped", reason)


def main() -> None:
    checks = suite(*sys.argv[1:4])
    print(json.dumps({name: outcome(checks, name) for name in checks.checks()}))


if __name__ == "__main__":
    main()
