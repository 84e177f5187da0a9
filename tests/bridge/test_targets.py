# SPDX-License-Identifier: Apache-2.0
"""A YAML file, `kd.divergence` and a checkpoint's saved configuration build data and run nothing."""

from pathlib import Path

from megatron_kd import dryrun

SMOLLM2 = "smollm2_135m_pretrain_3cpu_fp32_kd_config"
HOSTILE = [
    "os.system",
    "subprocess.run",
    "builtins.eval",
    "torch.os.system",
    "torch.serialization.os.system",
    "torch.utils.cpp_extension.subprocess.run",
    "megatron.bridge.training.config.os.system",
    "megatron_kd.launch.machine.output_of",
    "megatron_kd.cli.main",
    "megatron_kd.bridge.export.export_hf",
    "megatron_kd.dryrun.launch.shutil.rmtree",
    "transformers.pipeline",
    "torch.save",
    "torch.multiprocessing.spawn",
    "numpy.load",
]


def in_rank_hostile(folder: Path) -> dict[str, str]:
    """What each hostile target was answered, in a YAML file as it stands, below another, and as a list's item."""
    from megatron_kd.bridge.config import load_config
    from megatron_kd.errors import ConfigError

    proof, yaml = folder / "it-ran", folder / "run.yaml"
    answers = {}
    for target in HOSTILE:
        call = f"{{_target_: {target}, _args_: ['touch {proof}']}}"
        good = "megatron.bridge.training.tokenizers.config.TokenizerConfig"
        for value in (call, f"{{_target_: {good}, tokenizer_model: {call}}}", f"{{_target_: {good}, x: [{call}]}}"):
            yaml.write_text(f"recipe: {SMOLLM2}\ntokenizer: {value}\n")
            try:
                load_config(config_file=yaml)
                answers[target] = "accepted"
            except ConfigError as error:
                answers.setdefault(target, str(error))
    assert not proof.exists()
    return answers


def test_a_hostile_target_is_refused_and_not_run(tmp_path: Path):
    answers = dryrun.run_ranks(in_rank_hostile, 1, args=(tmp_path,))[0]
    for target, answer in answers.items():
        assert answer != "accepted" and target in answer and "run.yaml:2" in answer, (target, answer)
    assert "is posix.system, which no configuration needs" in answers["torch.os.system"]
    assert "no dataclass" in answers["megatron_kd.cli.main"]


def in_rank_saved(folder: Path) -> None:
    import pytest
    import yaml
    from megatron.training.config.yaml_utils import safe_yaml_representers

    from megatron_kd.bridge.config import load_config, resolve_divergence
    from megatron_kd.bridge.export import export_hf
    from megatron_kd.bridge.preflight import check_paths
    from megatron_kd.bridge.recipes import recipe_names
    from megatron_kd.bridge.targets import UnsafeTarget, check_targets
    from megatron_kd.errors import ConfigError

    for name in [*recipe_names()[:7], "llama31_8b_pretrain_2gpu_h100_bf16_config"]:
        with safe_yaml_representers():
            saved = yaml.safe_load(yaml.safe_dump(load_config(name)[0].to_dict()))
        check_targets(saved, name)  # what Bridge itself saves passes
    checkpoint = folder / "checkpoint" / "iter_0000002"
    checkpoint.mkdir(parents=True)
    saved["model"]["activation_func"] = {"_target_": "torch.os.system", "_call_": False}
    (checkpoint / "run_config.yaml").write_text(yaml.safe_dump(saved))
    cfg, _ = load_config(SMOLLM2, overrides=[f"checkpoint.pretrained_checkpoint={checkpoint.parent}"])
    with pytest.raises(UnsafeTarget, match="run_config.yaml: _target_ torch.os.system is posix.system"):
        check_paths(cfg)
    for hostile in (
        {"_target_": "torch.hub.load", "_partial_": True, "_args_": ["somebody/else", "model"]},
        {"_target_": "torch.load", "_partial_": True, "weights_only": False},
    ):
        with pytest.raises(UnsafeTarget, match="must not call it"):
            check_targets({"model": {"init_method": hostile}}, "a checkpoint")
    with pytest.raises(UnsafeTarget, match="posix.system"):
        export_hf(checkpoint.parent, folder, folder / "out")
    for divergence in ("torch:os.system", "os:system", "megatron_kd.loss:os"):
        with pytest.raises(ConfigError):
            resolve_divergence(divergence)
    assert resolve_divergence("megatron_kd.loss.divergence:forward_kl") is not None


def test_a_saved_configuration_and_a_divergence_are_held_to_the_same(tmp_path: Path):
    dryrun.run_ranks(in_rank_saved, 1, args=(tmp_path,))
