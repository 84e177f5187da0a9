# SPDX-License-Identifier: Apache-2.0
"""Tables for a terminal: rows of text in, aligned lines out."""

from collections.abc import Sequence

BYTES = ("B", "KiB", "MiB", "GiB", "TiB")


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns under a rule; the first column to the left, the others, which hold figures, to the right.

    Raises:
        ValueError: a row has more or fewer cells than `head`.
    """
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def format_bytes(count: float) -> str:
    """Three figures and a unit: 85.2 GiB."""
    power = 0
    while abs(count) >= 1024 and power < len(BYTES) - 1:
        count /= 1024
        power += 1
    digits = 0 if power == 0 or count >= 100 else 1 if count >= 10 else 2
    return f"{count:.{digits}f} {BYTES[power]}"
