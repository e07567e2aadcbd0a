from collections.abc import Callable
from typing import Any

class ShortWay:
    """One lane's blocking calls on numpy arrays. `otherwise(code, x, out)` says how one ends that has not, or not well.

    Calling it returns False if nothing was done: something about the call is unusual, or the way is closed.
    """

    arrays: Any
    def __init__(self, lane: int, otherwise: Callable[[int, Any, Any], bool]) -> None: ...
    def __call__(self, collective: int, op: str, root: int, x: Any, out: Any) -> bool: ...
