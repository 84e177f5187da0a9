# SPDX-License-Identifier: Apache-2.0
"""`megatron-kd compare` of fine-tuning data from a YAML, packed and not: what a sweep over packing shows."""

import json

import pytest

from megatron_kd import cli
from megatron_kd.dryrun import run_ranks
from tests.bridge import sft

pytestmark = pytest.mark.slow
SWEPT = ("False", "True")

YAML = f"""\
recipe: smollm2_135m_pretrain_3cpu_fp32_kd_config
student: ROOT/student
kd: {{cache: ROOT/pairs-cache, ce_weight: 0.5}}
model:
  tensor_model_parallel_size: 1
  sequence_parallel: false
  seq_length: {sft.SEQ_LENGTH}
  calculate_per_token_loss: true
ddp: {{average_in_collective: false}}
dataset:
  _target_: megatron.bridge.data.builders.GPTSFTDatasetConfig
  dataset_root: ROOT/pairs
  seq_length: ${{model.seq_length}}
  num_workers: 0
  do_validation: false
  do_test: false
  preprocessing:
    _target_: megatron.bridge.data.sft_processing.PromptCompletionSFTPreprocessingConfig
    prompt_column: input
    completion_column: output
    separator: " "
  offline_packing_specs:
    _target_: megatron.bridge.data.packing.PackedSequenceSpecs
    packed_sequence_size: {sft.PACK}
train: {{global_batch_size: 2, micro_batch_size: 1, train_iters: 2}}
optimizer: {{lr: 1.0e-3}}
scheduler: {{lr_warmup_iters: 1}}
validation: {{eval_iters: 0}}
logger: {{log_interval: 1}}
"""


def test_a_sweep_over_packing(tmp_path, capsys):
    """Fused as dense, and their cross entropy as Megatron's, packed and not."""
    run_ranks(sft.make_caches, 1, args=(tmp_path,))
    (tmp_path / "run.yaml").write_text(YAML.replace("ROOT", str(tmp_path)))
    folder = tmp_path / "compared"
    words = ["compare", "--config-file", str(tmp_path / "run.yaml"), "--cpu-ranks", "1", "--run-dir", str(folder)]
    sweep = ["--methods", "megatron,fused,dense", "--sweep", "dataset.enable_offline_packing=false,true"]
    status = cli.main([*words, *sweep, "--assert-equal"])
    shown = capsys.readouterr().out
    assert status == 0, shown
    methods = {method["name"]: method for method in json.loads((folder / "compare.json").read_text())["methods"]}
    names = [f"{name} dataset.enable_offline_packing={on}" for name in ("megatron", "fused", "dense") for on in SWEPT]
    assert [*methods] == names
    steps = {name: methods[name]["steps"] for name in names}
    assert all([step["step"] for step in found] == [1, 2] for found in steps.values())
    for on in SWEPT:
        fused, dense, stock = (
            steps[f"{name} dataset.enable_offline_packing={on}"] for name in ("fused", "dense", "megatron")
        )
        for found, expected in zip(fused, dense, strict=True):
            for name in ("kd loss", "lm loss", "total loss", "grad norm"):
                assert found[name] == pytest.approx(expected[name], rel=1e-4)
        assert fused[0]["lm loss"] == pytest.approx(stock[0]["lm loss"], rel=1e-4)  # of the same tokens
    unpacked, packed = (steps[f"fused dataset.enable_offline_packing={on}"][0]["lm loss"] for on in SWEPT)
    assert abs(unpacked - packed) > 1e-3  # of two examples, and of two packs of them
