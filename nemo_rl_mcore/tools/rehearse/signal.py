"""A reward that answers of random weights differ in, where nothing would earn the recipe's own."""

from collections.abc import Sequence


def variety(responses: Sequence[str]) -> list[float]:
    """Return for each response a number between 0 and 1 that depends on every character of it."""
    return [sum(ord(character) % 7 for character in text) / (6 * max(1, len(text))) for text in responses]
