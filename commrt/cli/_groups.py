"""Options of a command in groups, as dataclasses: shared between commands, and handed on whole."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command with each parameter that is annotated with a dataclass spread into that class's fields.

    The fields are annotated as typer's parameters are. Their names must differ between all groups and parameters.
    """
    # Not get_type_hints, which before Python 3.11 makes an Optional of what defaults to None.
    whole = inspect.signature(command, eval_str=True).parameters
    hints = {name: parameter.annotation for name, parameter in whole.items()}
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}

    @functools.wraps(command)
    def spread(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    parameters: list[inspect.Parameter] = []
    for name, parameter in whole.items():
        if name in groups:
            parameters += _of_group(groups[name])
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    setattr(spread, "__signature__", inspect.Signature(parameters))  # noqa: B010 - which mypy knows nothing of
    spread.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return spread


def _of_group(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    return [inspect.Parameter(f.name, kind, default=f.default, annotation=hints[f.name]) for f in fields(group)]
