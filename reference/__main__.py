"""Write every page of docs/reference anew."""

from __future__ import annotations

from reference import FOLDER, PAGES, written

FOLDER.mkdir(exist_ok=True)
for name in PAGES:
    (FOLDER / name).write_text(written(name))
