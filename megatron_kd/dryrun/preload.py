# SPDX-License-Identifier: Apache-2.0
"""Imported by the fork server, once: pays for torch, Megatron and Bridge (about 25 s), so that ranks start at once.

One thread per process throughout: a process that has started threads cannot be forked safely.
"""

import os

for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_variable] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch  # noqa: E402

torch.set_num_threads(1)

from megatron_kd.dryrun.device import enable  # noqa: E402

enable()

import megatron.bridge.recipes.common  # noqa: E402, F401
import megatron.bridge.training.checkpointing  # noqa: E402, F401
import megatron.bridge.training.gpt_step  # noqa: E402, F401
import megatron.bridge.training.pretrain  # noqa: E402, F401

import megatron_kd.dryrun.layers  # noqa: E402, F401
