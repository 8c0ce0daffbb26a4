"""Aligned columns of plain text."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def table(
    header: Sequence[str] | None, rows: Sequence[Sequence[str]], right: Collection[int] = ()
) -> list[str]:
    """Rows of cells in aligned columns, two spaces apart; the columns in `right` are right-aligned."""
    cells = [list(map(str, row)) for row in ([header] if header else []) + list(rows)]
    if not cells:
        return []
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
