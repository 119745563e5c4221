"""Writes the tables of settings in docs/operating.md from their declarations in the code.

    python scripts/settings_table.py            says whether the page is current (exit code 1 if it is not)
    python scripts/settings_table.py --write    renews it

The tables stand between `<!-- settings: begin -->` and `<!-- settings: end -->`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Literal, get_args, get_origin

from rollout.settings_sources import Key, setting_keys

PAGE = Path(__file__).resolve().parent.parent / "docs" / "operating.md"


def settings_table() -> str:
    """A markdown table a section, one row a setting."""
    lines: list[str] = []
    section: object = ...
    for key in sorted(setting_keys(), key=lambda key: key.section is None):  # stable; what has no section comes last
        if key.section != section:
            section = key.section
            lines += ["", f"**`[{section}]`**" if section else "**outside of the sections**", ""]
            lines += ["| setting | flag | values | default | meaning |", "|---|---|---|---|---|"]
        default = "none" if key.field.default is None else str(key.field.default).lower()
        shown = f"`{default}`" if default else ""
        cells = (f"`{key.name}`", f"`{key.flag}`", _values(key), shown, key.field.description)
        lines.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines[1:])


def renewed(page: str) -> str:
    """The page with the tables renewed; ValueError if a marker is missing."""
    begin, end = "<!-- settings: begin -->\n", "<!-- settings: end -->"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"the page must have one {begin.strip()} and one {end}")
    return page[: page.index(begin) + len(begin)] + f"\n{settings_table()}\n\n" + page[page.index(end) :]


def _values(key: Key) -> str:
    annotation = key.field.annotation
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(annotation))
    kinds = [kind for kind in get_args(annotation) or (annotation,) if kind is not type(None)]
    name = {int: "integer", float: "number", str: "text", bool: "`true`, `false`"}[kinds[0]]
    bounds = [
        f"{sign} {getattr(rule, attribute)}"
        for rule in key.field.metadata
        for attribute, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
        if getattr(rule, attribute, None) is not None
    ]
    return " ".join([name, ", ".join(bounds)]).strip() + (", or none" if key.optional else "")


def main() -> int:
    """Check the page, or renew it with `--write`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true", help="renew the page")
    arguments = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    current = renewed(page)
    if arguments.write:
        PAGE.write_text(current, encoding="utf-8")
        return 0
    if page != current:
        print(f"{PAGE.name} is not current: python scripts/settings_table.py --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
