# SPDX-License-Identifier: Apache-2.0
"""Caches of one corpus by a Megatron teacher at several layouts, in the same four CPU ranks; runs inside a rank."""

from pathlib import Path

LAYOUTS = {
    "DP=4": {},
    "TP=2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "PP=2": {"pipeline_model_parallel_size": 2},
    "PP=2 VP=2": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "EP=2": {"expert_model_parallel_size": 2},
    "CP=2": {"context_parallel_size": 2},
    "TP=2 PP=2": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "pipeline_model_parallel_size": 2,
    },
    "PP=2, of a checkpoint": {"pipeline_model_parallel_size": 2},
    "TP=2 CP=2": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 2},
}
OPTIONS = {"top_k": 20, "temperatures": (2.0,), "values": "f32", "tile_tokens": 300, "batch_tokens": 256}


def build_all(hf: Path, corpus: Path, root: Path) -> None:
    """A cache for every layout, at root/NAME; one from a Megatron checkpoint that the first layout leaves."""
    import torch
    from megatron.bridge import AutoBridge
    from megatron.core import parallel_state

    from megatron_kd.bridge.teacher import MegatronTeacher
    from megatron_kd.cache import Corpus, DocumentUnits
    from megatron_kd.dryrun import prepare_model
    from megatron_kd.teacher.build import build_cache

    torch.distributed.init_process_group("gloo")
    for name, sizes in LAYOUTS.items():
        checkpoint = root / "checkpoint" if "checkpoint" in name else None
        teacher = MegatronTeacher.load(
            hf, checkpoint=checkpoint, dtype="float32", settings=sizes, prepare=prepare_model
        )
        if name == next(iter(LAYOUTS)):
            AutoBridge.from_hf_pretrained(str(hf)).save_megatron_model(teacher.model, root / "checkpoint")
        build_cache(
            teacher,
            DocumentUnits(Corpus(corpus)),
            root / name,
            accept_teacher_loss=True,
            progress=False,
            **OPTIONS,
        )
        torch.distributed.barrier()
        parallel_state.destroy_model_parallel()


FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the four-bit floats (E2M1); the highest bit is the sign."""


def write_mxfp4(root: Path) -> None:
    """A GPT-OSS with MXFP4 experts, as OpenAI's are stored, in root/mxfp4; the same numbers in bf16 in root/bf16.

    32 columns share a power of two (E8M0, biased by 127); a byte holds two columns, the first in its low half. Source:
    OCP Microscaling Formats (MX) Specification 1.0; the layout is that of openai/gpt-oss-20b.
    """
    import json
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    from tests.dryrun.tiny import write_tiny_gpt_oss

    write_tiny_gpt_oss(root / "bf16", dtype="bfloat16", hidden_size=96, seed=3)
    weights = load_file(root / "bf16" / "model.safetensors")
    generator, magnitudes, quantised = torch.Generator().manual_seed(0), torch.tensor(FP4), dict(weights)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = weights[name].shape  # stored the other way round in bf16
        codes = torch.randint(0, 16, (experts, rows, columns), generator=generator)
        exponents = torch.randint(-5, -2, (experts, rows, columns // 32), generator=generator)
        values = magnitudes[codes % 8] * torch.where(codes < 8, 1, -1) * 2.0 ** exponents.repeat_interleave(32, dim=2)
        weights[name] = values.transpose(1, 2).contiguous().to(torch.bfloat16)
        del quantised[name]
        packed = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
        quantised[f"{name}_blocks"] = packed.unflatten(2, (columns // 32, 16)).contiguous()
        quantised[f"{name}_scales"] = (exponents + 127).to(torch.uint8)
    shutil.copytree(root / "bf16", root / "mxfp4")
    save_file(weights, root / "bf16" / "model.safetensors", metadata={"format": "pt"})
    save_file(quantised, root / "mxfp4" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((root / "mxfp4" / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (root / "mxfp4" / "config.json").write_text(json.dumps(config))
