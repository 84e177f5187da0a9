# SPDX-License-Identifier: Apache-2.0
"""The results of an evaluation: a folder with `evaluation.json` and `evaluation.csv`, which can be continued.

In: scores, a model at a time. Out: both files, rewritten after each model, and the table. A model that is in the file
is finished; a file that was made in another way is refused, so that one table never mixes two ways to measure.
"""

import csv
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_kd.errors import UserError
from megatron_kd.folders import make_folder
from megatron_kd.report.table import format_table


class Score(NamedTuple):
    """One figure: of a model, on a task; `stderr` is None where the harness has none, `samples` the examples seen."""

    task: str
    metric: str
    model: str
    value: float
    stderr: float | None
    samples: int | None


class Evaluation:
    """What has been measured so far, in memory and in a folder."""

    def __init__(self, out: Path, settings: Mapping[str, Any], versions: Mapping[str, str]):
        """Takes up the folder's results, if it has any.

        Args:
            out: folder; made if missing.
            settings: all that scores depend on but for the model, by the names that the user knows; JSON values.
            versions: of the packages that measure; written down, not compared.

        Raises:
            UserError: the folder's results were measured with other settings.
        """
        self.out, self.settings, self.versions = out, dict(settings), dict(versions)
        self.models: dict[str, dict[str, str | None]] = {}
        self.scores: list[Score] = []
        make_folder(out, "--out")
        path = out / "evaluation.json"
        if not path.exists():
            return
        try:
            record = json.loads(path.read_text())
            before, self.models = record["settings"], record["models"]
            self.scores = [Score(**score) for score in record["scores"]]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is not one of evaluate's. Give --out another folder, or remove it.") from error
        changed = [
            f"{name} is {self.settings.get(name)!r}, and was {before.get(name)!r}"
            for name in sorted({*before, *self.settings})
            if before.get(name) != self.settings.get(name)
        ]
        if changed:
            raise UserError(
                f"{path} was measured with other settings: {'; '.join(changed)}. Set them as they were, or give --out "
                "another folder."
            )

    def finished(self, name: str, folder: str) -> bool:
        """Whether the model has its scores already.

        Raises:
            UserError: the name was another model's, or the model's files have changed.
        """
        if name not in self.models:
            return False
        before = self.models[name]
        if before["folder"] != folder:
            raise UserError(
                f"{name} is {folder}, and in {self.out} it is {before['folder']}. Give it another name, or --out "
                "another folder."
            )
        if before["files"] != _files(folder):
            raise UserError(
                f"{name}: the files of {folder} have changed since {self.out} was written. Give it another name, or "
                "--out another folder."
            )
        return True

    def add(self, name: str, folder: str, scores: Iterable[Score]) -> None:
        """A model is finished: both files have its scores when this returns."""
        self.models[name] = {"folder": folder, "files": _files(folder)}
        self.scores += scores
        record = {"settings": self.settings, "versions": self.versions, "models": self.models}
        record["scores"] = [score._asdict() for score in self.scores]
        _replace(self.out / "evaluation.csv", [Score._fields, *self.scores])
        _replace(self.out / "evaluation.json", record)

    def table(self, models: Sequence[str]) -> str:
        """A line a task and metric, a column a model: value and standard error."""
        cells = {
            (score.task, score.metric, score.model): f"{score.value:.4f}"
            + ("" if score.stderr is None else f" ±{score.stderr:.4f}")
            for score in self.scores
        }
        lines = dict.fromkeys((score.task, score.metric) for score in self.scores)
        rows = [
            [f"{task} {metric}", *(cells.get((task, metric, model), "") for model in models)] for task, metric in lines
        ]
        return format_table(["task", *models], rows)


def files_digest(files: Iterable[Path], *, content: bool) -> str:
    """Names, and contents or else sizes and times (weights are too large to read), as one word."""
    digest = hashlib.sha256()
    for path in sorted(files):
        state = path.stat()
        told = path.read_bytes() if content else f"{state.st_size} {state.st_mtime_ns}".encode()
        digest.update(path.name.encode() + b"\0" + told + b"\0")
    return digest.hexdigest()[:16]


def _files(folder: str) -> str | None:
    """None for a model of the hub, whose files lie elsewhere."""
    path = Path(folder)
    wanted = (file for file in path.glob("*") if file.suffix in (".json", ".safetensors", ".bin", ".model"))
    return files_digest(wanted, content=False) if path.is_dir() else None


def _replace(path: Path, what: Any) -> None:
    """The old file or the new one, whole, at whatever moment a run is killed."""
    partial = path.with_name(f"{path.name}.partial")
    with open(partial, "w", newline="") as file:
        if path.suffix == ".csv":
            csv.writer(file).writerows(what)
        else:
            json.dump(what, file, indent=1)
    os.replace(partial, path)
