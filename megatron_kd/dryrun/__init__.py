# SPDX-License-Identifier: Apache-2.0
"""CPU ranks for the real Megatron-Bridge loop: a recipe's mistakes cost seconds on a login node, not an allocation.

`enable` patches the process, `prepare` makes a recipe fit for CPU ranks, `shrink` makes it tiny, `run_ranks` starts
the ranks. Importing this package patches nothing.
"""

from megatron_kd.dryrun.launch import RankFailed, Ranks, refusals_raised, run_ranks, start_ranks
from megatron_kd.dryrun.prepare import Change, prepare, prepare_model
from megatron_kd.dryrun.shrink import shrink

__all__ = [
    "Change",
    "RankFailed",
    "Ranks",
    "enable",
    "prepare",
    "prepare_model",
    "refusals_raised",
    "run_ranks",
    "shrink",
    "start_ranks",
]


def enable() -> None:
    """Patch this process for CPU ranks and import megatron.bridge; see `megatron_kd.dryrun.device.enable`."""
    from megatron_kd.dryrun.device import enable as enable_device  # imports torch

    enable_device()
