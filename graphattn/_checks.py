"""Checks of arguments that many functions and layers have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def check_at_least(owner: str, least: int, **numbers: int | Sequence[int] | None) -> None:
    """Raises ``ValueError`` for a number below ``least``; ``None`` means that none is given.

    Args:
        owner: The function or class that the error speaks of.
        least: The smallest number allowed.
        numbers: What was given, by the name of the argument; of a sequence, each number counts.
    """
    for argument, given in numbers.items():
        each = tuple(given) if isinstance(given, Sequence) else (given,)
        if not each or any(number is not None and number < least for number in each):
            raise ValueError(f"{owner}: {argument} must be at least {least}, got {given}.")


def check_probability(owner: str, **probabilities: float) -> None:
    """Raises ``ValueError`` for a number, given by the name of its argument, not from 0 to 1."""
    for argument, given in probabilities.items():
        if not 0.0 <= given <= 1.0:
            raise ValueError(f"{owner}: {argument} must be a probability from 0 to 1, got {given}.")


def check_choice(owner: str, choices: Iterable[str | None], **values: str | None) -> None:
    """Raises ``ValueError`` for a value, given by the name of its argument, not in ``choices``."""
    known = tuple(choices)
    for argument, value in values.items():
        if value not in known:
            listed = ", ".join(repr(choice) for choice in known)
            raise ValueError(f"{owner}: {argument} must be one of {listed}, got {value!r}.")
