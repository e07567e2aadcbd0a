"""What `import torch` calls, by the entry point in `torch.backends`."""

from __future__ import annotations

import logging


def autoload() -> None:
    """Register the backend "commrt". Never raises: a torch that commrt can't serve still has to import."""
    try:
        import commrt.torch  # noqa: F401 - imported for its effect
    except Exception as error:
        logging.getLogger("commrt.init").warning("torch.distributed won't know the backend commrt: %s", error)
