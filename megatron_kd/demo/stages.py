# SPDX-License-Identifier: Apache-2.0
"""The demo's stages: each makes one folder of the run, and is not made twice with the same settings.

In: a title, what the stage's result depends on, and a function that fills the stage's folder. Out: the function's
result, from this run or from an earlier one. `stage.json` in the folder says with which settings it was begun, and
once it is done, what was found and how long it took.
"""

import hashlib
import json
import os
import shutil
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_kd.errors import UserError

RECORD = "stage.json"
WIDTH = 110


class ForeignFolder(UserError):
    """A folder that a stage would write to was made by something else."""


@dataclass
class Done:
    """A finished stage: what it returned, where its files are, and what it cost when it was made."""

    name: str
    folder: Path
    settings: dict[str, Any]
    result: dict[str, Any]
    seconds: float
    reused: bool

    @property
    def digest(self) -> str:
        """Stands for all that the result depends on; for the settings of stages that build on this one."""
        return hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()[:16]


@dataclass
class Stages:
    """Runs stages in order and tells the user about each.

    Args:
        run_dir: folder of the run; each stage gets a folder in it.
        total: number of stages, for the headings.
    """

    run_dir: Path
    total: int
    done: list[Done] = field(default_factory=list)

    def run(
        self,
        name: str,
        title: str,
        text: str,
        make: Callable[[Path], dict[str, Any]],
        *,
        settings: dict[str, Any],
        after: Sequence[Done] = (),
        tell: Callable[[dict[str, Any]], str],
        continues: bool = False,
    ) -> Done:
        """Make a stage, or reuse what an earlier run made.

        Args:
            name: the stage's folder in the run folder.
            title: its heading.
            text: what it does, for the user.
            make: fills the folder and returns what it found, as JSON can hold it.
            settings: everything the result depends on besides the stages before it.
            after: the stages whose results are used.
            tell: one paragraph about the result.
            continues: `make` goes on where it was interrupted; otherwise a half-made folder is emptied first.

        Raises:
            ForeignFolder: the folder exists and is not of the demo.
        """
        print(f"\n[{len(self.done) + 1}/{self.total}] {title}", flush=True)
        _say(text)
        folder = self.run_dir / name
        settings = settings | {f"after {stage.name}": stage.digest for stage in after}
        record = _read(folder)
        same = record is not None and record["settings"] == settings
        reused = same and record["seconds"] is not None
        if not reused:
            if not (same and continues):
                shutil.rmtree(folder, ignore_errors=True)
            record = _make(folder, settings, make)
        _say(tell(record["result"]))
        seconds = f"{record['seconds']:.1f} s"
        _say(f"Reused from {folder}; it took {seconds} to make." if reused else seconds)
        self.done.append(Done(name, folder, settings, record["result"], record["seconds"], reused))
        return self.done[-1]


def _make(folder: Path, settings: dict[str, Any], make: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder, {"settings": settings, "result": None, "seconds": None})
    started = time.monotonic()
    result = make(folder)
    record = {"settings": settings, "result": result, "seconds": round(time.monotonic() - started, 2)}
    _write(folder, record)
    return record


def _read(folder: Path) -> dict[str, Any] | None:
    if not folder.exists() or not any(folder.iterdir()):
        return None
    if not (folder / RECORD).exists():
        raise ForeignFolder(
            f"{folder} exists and the demo did not make it: expected {RECORD} in it. Choose another --run-dir."
        )
    return json.loads((folder / RECORD).read_text())


def _write(folder: Path, record: dict[str, Any]) -> None:
    partial = folder / f".{RECORD}"
    partial.write_text(json.dumps(record, indent=1))
    os.replace(partial, folder / RECORD)


def _say(text: str) -> None:
    print(textwrap.fill(text, WIDTH, initial_indent="      ", subsequent_indent="      "), flush=True)
