"""Runs of `tiny_images.toml` whose rows name files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.running import IMAGES

SOURCE = 'kind = "python"\nfunction = "tiny_images.make"\nsize = 200\n'


def write_config(folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write rows as JSON Lines, and a configuration that reads them; return the configuration."""
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "tiny_images.py").write_text(IMAGES.with_suffix(".py").read_text())
    config = folder / "media.toml"
    config.write_text(IMAGES.read_text().replace(SOURCE, f'kind = "jsonl"\npath = "{folder}/rows.jsonl"\n'))
    return config
