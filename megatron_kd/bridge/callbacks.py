# SPDX-License-Identifier: Apache-2.0
"""What watches a run from inside Bridge's loop."""

from megatron.bridge.training.callbacks import Callback, CallbackContext

from megatron_kd.bridge.config import UserValues, check_final
from megatron_kd.errors import UserError


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
