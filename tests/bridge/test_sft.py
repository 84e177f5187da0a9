# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning data: every position with loss meets the row of the tokens before it, packed or not, at any layout."""

import math

import numpy as np
import pytest

from megatron_kd.cache import CacheReader
from megatron_kd.cli import main
from megatron_kd.dryrun import RankFailed, run_ranks
from tests.bridge import sft

LAYOUTS = [{}, {"cp": 2}, {"tp": 2}, {"pp": 2}, {"pp": 3}, {"ep": 2}, {"tp": 2, "cp": 2}]
LOSSES = ("lm loss", "kd loss", "total loss", "grad norm")
EXAMPLES = len(sft.ANSWERS) + 1


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("sft")
    found = run_ranks(sft.make_caches, 1, args=(root,))[0]
    assert found["pairs"] == EXAMPLES - 1 + 4 and found["long"] == found["pairs"] + 2  # training and validation
    return root


def steps(root, data, world_size, **kwargs):
    """Losses and gradient norms [steps, 4] of the last rank."""
    report = run_ranks(sft.distil_sft, world_size, args=(root, data), kwargs=kwargs)[-1]
    return np.array([[step[name] for name in LOSSES] for step in report])


def test_one_cache_serves_unpacked_offline_packed_and_in_batch_packed_data(data):
    """The cache is of the unpacked data. Answers without a word, with one, too long; an example that stands twice."""
    found = run_ranks(sft.check_all_batches, 1, args=(data,))[0]
    loss = sum(sft.ANSWERS) + sft.ANSWERS[1] + EXAMPLES  # after each answer its end
    for packing in (None, "offline", "in_batch"):
        assert found["pairs", packing]["rows"] == loss
        assert found["long", packing]["rows"] == loss + sft.TOO_LONG + 1
        assert found["long", packing]["longest"] == sft.SEQ_LENGTH - 1
    assert found["pairs", "offline"]["packed"] < EXAMPLES / 2


def whole(root, packing, cp=1, ep=1, **layout):
    """One step over all of the data."""
    batch = {"global_batch": EXAMPLES}
    if packing == "offline":
        count = run_ranks(sft.count_items, 1, args=(root, "pairs"), kwargs={"packing": packing, "cp": cp})[0]
        batch = {"global_batch": count}
    elif packing == "in_batch":
        batch |= {"micro_batch": EXAMPLES // 2 // ep}
    world_size = cp * ep * math.prod(layout.values())
    return steps(root, "pairs", world_size, packing=packing, cp=cp, ep=ep, steps=1, **batch, **layout)


@pytest.fixture(scope="module")
def unpacked(data):
    return whole(data, None)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_packed_as_unpacked_at_every_layout_as_on_one_rank(data, unpacked, layout):
    for packing in (None, "offline", "in_batch"):
        np.testing.assert_allclose(whole(data, packing, **layout), unpacked, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_validation_reads_the_cache_as_well(data):
    """The five answers that are not trained on, in one batch; their cross entropy is what Megatron reports."""

    def evaluated(world_size=1, **kwargs):
        return run_ranks(sft.distil_evaluated, world_size, args=(data,), kwargs={"global_batch": 5} | kwargs)[-1]

    first, stock = evaluated(), evaluated(kd=False)
    assert first["lm loss"] == pytest.approx(stock["lm loss"], abs=5e-3) and first["kd loss"] > 0.1
    for found in (
        evaluated(2, tp=2),
        evaluated(2, pp=2),
        evaluated(2, cp=2),
        evaluated(packing="offline", global_batch=2),
    ):
        assert found == pytest.approx(first, abs=1e-5)


@pytest.mark.slow
def test_a_killed_packed_run_ends_alike_at_another_data_parallel_size(data, tmp_path):
    """Packed offline, on two context-parallel ranks, shuffled; the kill is in the middle of the second epoch."""
    run = {"packing": "offline", "cp": 2, "steps": 4, "global_batch": 2}
    first = steps(data, "pairs", 2, **run)
    with pytest.raises(RankFailed, match="exit code -9"):
        steps(data, "pairs", 4, run_dir=tmp_path / "run", kill_after=3, **run)
    resumed = steps(data, "pairs", 2, run_dir=tmp_path / "run", **run)
    np.testing.assert_allclose(resumed, first[2:], atol=1e-5, rtol=0)


def test_a_cache_of_other_examples_is_refused_before_the_first_step(data):
    with pytest.raises(RankFailed, match="is none of the cache's examples"):
        run_ranks(sft.distil_sft, 1, args=(data, "long"), kwargs={"cache": "chats-cache", "steps": 1})


RUN = """\
recipe: gpt_oss_20b_pretrain_8gpu_h200_bf16_kd_config
student: {root}/student
model: {{seq_length: {length}}}
dataset:
  _target_: megatron.bridge.data.builders.GPTSFTDatasetConfig
  dataset_root: {root}/pairs
  seq_length: {length}
  do_test: false
  preprocessing:
    _target_: megatron.bridge.data.sft_processing.PromptCompletionSFTPreprocessingConfig
    prompt_column: input
    completion_column: output
    separator: " "
"""


def test_the_command_caches_the_examples_that_the_run_sees(data, tmp_path):
    """Against the examples of the same data read on a rank of a run."""
    (tmp_path / "run.yaml").write_text(RUN.format(root=data, length=sft.SEQ_LENGTH))
    build = ["cache", "build", "--teacher", str(data / "student"), "--sft", str(tmp_path / "run.yaml")]
    assert main([*build, "--out", str(tmp_path / "cache"), "--accept-teacher-loss", "--no-progress"]) == 0
    found, seen = (CacheReader(path).manifest for path in (tmp_path / "cache", data / "pairs-cache"))
    assert (found.units, found.corpus) == (seen.units, seen.corpus)
    assert found.tokenizer["digest"] == seen.tokenizer["digest"]
    assert found.teacher["engine"] == "transformers" and found.top_k == 100
