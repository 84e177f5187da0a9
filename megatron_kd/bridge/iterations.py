# SPDX-License-Identifier: Apache-2.0
"""Which of a run's checkpoints is meant. Imports nothing of Megatron."""

import re
from pathlib import Path

from megatron_kd.errors import UserError


def iteration_folder(checkpoint: Path, iteration: int | None) -> Path:
    """The folder ``iter_*`` that is meant.

    Raises:
        UserError: There is none.
    """
    if (checkpoint / "checkpoints").is_dir():
        checkpoint = checkpoint / "checkpoints"
    if not checkpoint.exists():
        raise UserError(f"checkpoint: {checkpoint} does not exist. Give the run's folder, or its `checkpoints`.")
    if checkpoint.name.startswith("iter_") and iteration is None:
        return checkpoint
    found = {int(path.name[5:]): path for path in checkpoint.glob("iter_*") if re.fullmatch(r"iter_\d+", path.name)}
    if not found:
        raise UserError(f"{checkpoint} holds no checkpoint: expected folders iter_* in it. Has the run saved one yet?")
    if iteration is not None and iteration not in found:
        raise UserError(f"{checkpoint} has no iteration {iteration}; it has {', '.join(map(str, sorted(found)))}.")
    return found[_newest(checkpoint, found) if iteration is None else iteration]


def _newest(checkpoint: Path, found: dict[int, Path]) -> int:
    """The last that was finished: a run killed while it saved leaves a folder beyond it that lacks parts."""
    tracker = checkpoint / "latest_checkpointed_iteration.txt"
    finished = tracker.read_text().strip() if tracker.exists() else ""
    return int(finished) if finished.isdigit() and int(finished) in found else max(found)
