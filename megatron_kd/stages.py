# SPDX-License-Identifier: Apache-2.0
"""Interleaved pipeline stages that exchange their messages in batches, and why two of them must not.

In a batch, Megatron tells messages to the stage before and to the one after apart by rank alone. Of two stages both
are the same rank, and activations are taken for one another without an error.
"""

from typing import Any

ONE_AT_A_TIME = {"overlap_p2p_comm": True, "batch_p2p_comm": False}
"""Settings of a model by which interleaved stages exchange one message at a time; Bridge's comm_overlap makes them."""


def mix_up_messages(model: Any) -> bool:
    """Whether the stages of a model provider, as it is set, would take their messages for one another."""
    if not model.virtual_pipeline_model_parallel_size or model.pipeline_model_parallel_size != 2:
        return False
    return any(getattr(model, name) != value for name, value in ONE_AT_A_TIME.items())
