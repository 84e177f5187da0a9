# SPDX-License-Identifier: Apache-2.0
"""What watches a run from inside Bridge's loop."""

import logging
import time
from collections import deque
from typing import Any

from megatron.bridge.training.callbacks import Callback, CallbackContext

from megatron_kd.bridge.config import KDConfig, UserValues, check_final
from megatron_kd.bridge.watch import LossMeter
from megatron_kd.errors import UserError

logger = logging.getLogger(__name__)

WINDOW = 20
"""Steps over which a figure must be bad before the run warns of it."""


class FinalValues(Callback):
    """Before the first step: what the user set must be what the run uses."""

    def __init__(self, user_values: UserValues):
        self.user_values = user_values

    def on_train_start(self, context: CallbackContext) -> None:
        """Raise `OverwrittenValue` if Bridge changed a value after the overrides."""
        check_final(context.state.cfg, self.user_values)


class VocabularyCheck(Callback):
    """Before the first step: every id the teacher may name must have a logit of the student's."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def on_train_start(self, context: CallbackContext) -> None:
        """Raise if the teacher's real vocabulary is larger than the student's."""
        student = context.state.cfg.model.vocab_size
        if student < self.vocab_size:
            raise UserError(
                f"model.vocab_size: expected at least {self.vocab_size} (the teacher's vocabulary), "
                f"found {student}. Teacher and student must share a tokenizer."
            )


class RunWatch(Callback):
    """Adds two times to a step's figures, which go wherever losses go, and warns once of what could be better.

    `kd read seconds` is the wait for teacher rows, `kd loss seconds` the loss's forward calls, both of the rank that
    logs.
    """

    def __init__(self, kd: KDConfig, feed: Any, meter: LossMeter):
        self.kd, self.feed, self.meter = kd, feed, meter
        self._waited = 0.0
        self._started = 0.0
        self._window: deque[dict[str, float]] = deque(maxlen=WINDOW)
        self._said: set[str] = set()

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Start the step's clocks."""
        self._started, self._waited = time.monotonic(), self.feed.wait_seconds

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Add the times; look at the last steps."""
        loss_seconds = self.meter.take()
        if not context.loss_dict:  # the losses are on the last stage
            return
        step_seconds = time.monotonic() - self._started
        like = context.loss_dict["kd loss"]
        for name, seconds in (
            ("kd read seconds", self.feed.wait_seconds - self._waited),
            ("kd loss seconds", loss_seconds),
        ):
            context.loss_dict[name] = like.new_tensor(seconds)
        figures = {name: float(value) for name, value in context.loss_dict.items()} | {"step seconds": step_seconds}
        self._window.append(figures)
        if len(self._window) < WINDOW:
            return
        means = {name: sum(step[name] for step in self._window) / WINDOW for name in figures}
        for name, text in advice(means, self.kd).items():
            if name not in self._said:
                self._said.add(name)
                logger.warning("step %d: %s", context.state.train_state.step + 1, text)


def advice(means: dict[str, float], kd: KDConfig) -> dict[str, str]:
    """What a run's figures, means over some steps, call for: a text by what it is about.

    Args:
        means: By the names in the log, and `step seconds`.
        kd: The run's settings.
    """
    found = {}
    share = means["kd read seconds"] / max(means["step seconds"], 1e-9)
    if share > 0.1:
        found["reader"] = (
            f"{share:.0%} of a step is spent waiting for the cache (kd read seconds). Raise kd.read_ahead (now "
            f"{kd.read_ahead}), put the cache on a faster disk, or see what the disk gives: megatron-kd cache bench."
        )
    if means["teacher tail"] > 0.2:
        found["tail"] = (
            f"the teacher's mass outside its entries is {means['teacher tail']:.0%} (teacher tail), of which the "
            "student learns the sum alone. Use more entries: a larger kd.top_k, or a cache built with one."
        )
    divergence, entropy = kd.kd_weight * means["kd loss"], kd.ce_weight * means["lm loss"]
    if kd.kd_weight and kd.ce_weight and not 0.1 <= divergence / max(entropy, 1e-9) <= 10:
        found["scale"] = (
            f"kd.kd_weight * kd loss is {divergence:.3g} and kd.ce_weight * lm loss {entropy:.3g}, so that one of "
            "them hardly counts. Change kd.kd_weight or kd.ce_weight, or set the smaller to 0."
        )
    return found
