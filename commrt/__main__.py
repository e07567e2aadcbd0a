"""`python -m commrt` is the `commrt` command."""

from __future__ import annotations

from commrt.cli import main

if __name__ == "__main__":
    main()
