# SPDX-License-Identifier: Apache-2.0
"""Bridge's own import and export on CPU ranks: the weights that come out are the ones that went in."""

from pathlib import Path

import pytest

from megatron_kd.dryrun import prepare_model, run_ranks
from tests.dryrun.tiny import train

TENSOR = dict(tensor_model_parallel_size=2, sequence_parallel=True, expert_tensor_parallel_size=1)
PIPELINE = dict(pipeline_model_parallel_size=2)
EXPERT = dict(expert_model_parallel_size=2)


def import_and_export(hf: Path, out: Path, sizes: dict[str, int]) -> None:
    import torch
    from megatron.bridge import AutoBridge

    bridge = AutoBridge.from_hf_pretrained(str(hf))
    provider = bridge.to_megatron_provider(load_weights=True)
    for name, value in sizes.items():
        setattr(provider, name, value)
    provider.bf16, provider.params_dtype, provider.pipeline_dtype = False, torch.float32, torch.float32
    prepare_model(provider)
    provider.finalize()
    torch.distributed.init_process_group("gloo")
    provider.initialize_model_parallel(seed=1)
    model = provider.provide_distributed_model(wrap_with_ddp=False)
    bridge.save_hf_pretrained(model, out, show_progress=False)
    torch.distributed.barrier()


def export_checkpoint(hf: Path, checkpoint: Path, out: Path) -> None:
    from megatron.bridge import AutoBridge

    AutoBridge.from_hf_pretrained(str(hf)).export_ckpt(str(checkpoint), str(out), show_progress=False)


def weights(folder: Path) -> dict:
    from safetensors.torch import load_file

    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def different(left: Path, right: Path) -> set[str]:
    one, other = weights(left), weights(right)
    assert set(one) == set(other) and one
    return {name for name in one if one[name].shape != other[name].shape or not one[name].equal(other[name])}


@pytest.mark.parametrize(
    ("model", "world_size", "sizes"),
    [
        ("gpt_oss", 2, TENSOR),
        ("gpt_oss", 2, EXPERT),
        ("gpt_oss", 4, TENSOR | PIPELINE),
        ("llama", 1, {}),
        ("llama", 4, TENSOR | PIPELINE),
    ],
)
def test_round_trip_is_bit_equal(model, world_size, sizes, request, tmp_path):
    hf = request.getfixturevalue(model)
    run_ranks(import_and_export, world_size, args=(hf, tmp_path / "out", sizes))
    assert different(hf, tmp_path / "out") == set()


def test_trained_checkpoint_exports_to_a_folder_transformers_reads(gpt_oss, tmp_path):
    run_ranks(train, 2, args=(gpt_oss,), kwargs=dict(tp=2, steps=2, run_dir=tmp_path / "run"))
    run_ranks(export_checkpoint, 1, args=(gpt_oss, tmp_path / "run", tmp_path / "out"))
    assert different(gpt_oss, tmp_path / "out") == set(weights(gpt_oss))
