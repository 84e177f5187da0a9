# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from megatron_kd.dryrun import run_ranks
from tests.dryrun.tiny import write_tiny_gpt_oss, write_tiny_llama


@pytest.fixture(scope="session")
def gpt_oss(tmp_path_factory) -> Path:
    """Hugging Face folder of a tiny GPT-OSS."""
    return run_ranks(write_tiny_gpt_oss, 1, args=(tmp_path_factory.mktemp("gpt-oss"),))[0]


@pytest.fixture(scope="session")
def llama(tmp_path_factory) -> Path:
    """Hugging Face folder of a tiny Llama with a tied head."""
    return run_ranks(write_tiny_llama, 1, args=(tmp_path_factory.mktemp("llama"),))[0]
