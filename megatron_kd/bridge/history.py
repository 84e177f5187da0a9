# SPDX-License-Identifier: Apache-2.0
"""A run's curves as a file: one JSON line per optimizer step, written while the run goes on.

Bridge's own console and TensorBoard logs are untouched. Costs one short line a step, on the last rank alone.
"""

import json
import time
from pathlib import Path

import torch
from megatron.bridge.training.callbacks import Callback, CallbackContext


class StepHistory(Callback):
    """Appends `{"step": 1, "seconds": 2.5, "lm loss": 4.1, ...}` per step; seconds are those of the step alone.

    Only the last rank writes: it is on the last pipeline stage, where the losses are.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self._started = 0.0

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Start the step's clock."""
        self._started = time.monotonic()

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Write the step's line."""
        if torch.distributed.get_rank() != torch.distributed.get_world_size() - 1:
            return
        line = {"step": context.state.train_state.step + 1, "seconds": round(time.monotonic() - self._started, 3)}
        line |= {name: float(value) for name, value in context.loss_dict.items()}
        if context.grad_norm is not None:
            line["grad norm"] = float(context.grad_norm)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
