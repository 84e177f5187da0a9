# SPDX-License-Identifier: Apache-2.0
"""A run's curve, read back from the file that history.py writes. Imports nothing of Megatron."""

import json
from pathlib import Path
from typing import Any


def read_steps(path: Path) -> list[dict[str, Any]]:
    """A mapping a step, in order of `step`; none without the file.

    Of a step that was made twice, since the run went on from a checkpoint before it, the later counts. A line that a
    killed run did not finish is none.
    """
    by_step: dict[int, dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            step = json.loads(line)
        except ValueError:
            continue
        by_step[step["step"]] = step
    return [by_step[number] for number in sorted(by_step)]
