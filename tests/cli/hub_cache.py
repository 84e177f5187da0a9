# SPDX-License-Identifier: Apache-2.0
"""A model in a cache of the Hugging Face hub, as its client lays it out."""

from pathlib import Path

COMMIT = "0" * 40


def put_model(cache: Path, name: str) -> None:
    """Writes a model OWNER/NAME that has nothing but an empty config.json."""
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
