"""What every environment's specification begins with, for tests that add the rest."""

from __future__ import annotations


def spec_head(title: str, python: str, *more: str) -> str:
    """Return the first lines of a specification up to the table ``[packages]``; ``more`` are lines of the top level."""
    lines = "".join(f"{line}\n" for line in more)
    return f"""
title = "{title}"
released = 2025-08-13
end-of-support = 2028-08-13
status = "supported"
python = "{python}"
{lines}exclude-newer = 2025-12-01T00:00:00Z
[cuda]
version = "12.6"
[gpu]
accelerators = ["1xA10"]
[packages]
"""
