"""Two sources side by side, as a table in a notebook (needs nothing else)."""

import difflib
import html
from pathlib import Path


class SideBySide:
    """Two source files next to each other, changed lines marked; shown as a table in a notebook."""

    def __init__(self, left: str | Path, right: str | Path) -> None:
        self.names = Path(left).name, Path(right).name
        a, b = (Path(file).read_text().splitlines() for file in (left, right))
        self.rows: list[tuple[str, str, bool]] = []
        for tag, i, j, k, m in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
            for n in range(max(j - i, m - k)):
                self.rows.append((a[i + n] if i + n < j else "", b[k + n] if k + n < m else "", tag != "equal"))
        self.changed = sum(bool(right) for _, right, changed in self.rows if changed)

    def _repr_html_(self) -> str:
        style = "text-align:left;vertical-align:top;white-space:pre-wrap;overflow-wrap:anywhere;padding:0 6px;"
        style += "font:11px/1.4 monospace;color:#222"

        def cell(text: str, colour: str) -> str:
            return f'<td style="{style};background:{colour}">{html.escape(text) or "&nbsp;"}</td>'

        head = "".join(f'<th style="text-align:left;width:50%">{name}</th>' for name in self.names)
        old, new, same = "#ffe3cf", "#d5f0e3", "#fff"
        body = "".join(
            f"<tr>{cell(a, old if changed and a else same)}{cell(b, new if changed and b else same)}</tr>"
            for a, b, changed in self.rows
        )
        return f'<table style="table-layout:fixed;width:100%"><tr>{head}</tr>{body}</table>'

    def __repr__(self) -> str:
        return f"{self.names[0]} and {self.names[1]}: {self.changed} new or changed lines"
