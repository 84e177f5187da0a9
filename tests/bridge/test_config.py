# SPDX-License-Identifier: Apache-2.0
"""Strict configuration on a real Bridge container, in a rank where Bridge is imported.

Functions named `in_rank_*` run there. What is valid is compared with what Bridge's own override code makes of it.
"""

from pathlib import Path

import pytest

from megatron_kd import dryrun

RECIPE = "gpt_oss_20b_pretrain_8gpu_h200_bf16_kd_config"
CACHE = "kd.cache=/cache"


def load(*overrides: str, yaml: str | None = None, folder: Path | None = None, recipe: str = RECIPE, **kwargs):
    """`load_config` with the YAML given as text."""
    from megatron_kd.bridge.config import load_config

    config_file = None
    if yaml is not None:
        config_file = folder / "run.yaml"
        config_file.write_text(yaml)
    return load_config(recipe, config_file=config_file, overrides=overrides, **kwargs)


def run(function, *args):
    """One CPU rank's result."""
    return dryrun.run_ranks(function, 1, args=args, timeout_s=300)[0]


# ---- valid settings ----


YAML = """\
optimizer: {lr: 1e-5, min_lr: 0.000001}
train: {train_iters: 50, exit_signal_handler: true}
model: {seq_length: 4096, recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 2}
dataset: {seq_length: 4096, split: "99,1,0", num_workers: 0}
env_vars: {NEW_NAME: 3}
tokenizer: {tokenizer_type: HuggingFaceTokenizer, tokenizer_model: /some/where}
"""
ARGUMENTS = ["optimizer.lr=2e-5", "logger.log_interval=1", "model.cp_comm_type=[p2p,a2a]", "mixed_precision=null"]


def in_rank_like_bridge(folder: Path) -> None:
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    ours, _ = load(*ARGUMENTS, yaml=YAML, folder=folder)
    stock, _ = load()
    process_config_with_overrides(stock, config_filepath=str(folder / "run.yaml"), cli_overrides=ARGUMENTS)
    assert ours.to_dict() == stock.to_dict()
    assert ours.optimizer.lr == 2e-5 and ours.train.train_iters == 50 and ours.env_vars["NEW_NAME"] == 3


def test_valid_settings_give_what_bridge_itself_makes_of_them(tmp_path: Path):
    run(in_rank_like_bridge, tmp_path)


def in_rank_conversions(folder: Path) -> dict:
    import torch

    yaml = """\
model: {params_dtype: bf16, pipeline_dtype: torch.float32, activation_func: gelu, seq_length: 128}
dataset: {seq_length: "${model.seq_length}", blend: [[/a, /b], [0.5, 0.5]], data_path: "${oc.env:CORPUS}/x"}
optimizer: {lr: 1}
kd: {cache: [a, b], temperature: 2}
mixed_precision: {grad_reduce_in_fp32: false}
comm_overlap: {tp_comm_overlap: true}
"""
    import os

    os.environ["CORPUS"] = "/corpora"
    cfg, values = load("model.seq_length=256", "comm_overlap.bucket_size=7", yaml=yaml, folder=folder)
    return {
        "dtypes": (cfg.model.params_dtype, cfg.model.pipeline_dtype) == (torch.bfloat16, torch.float32),
        "activation": cfg.model.activation_func is torch.nn.functional.gelu,
        "lengths": (cfg.model.seq_length, cfg.dataset.seq_length),
        "blend": cfg.dataset.blend,
        "data_path": cfg.dataset.data_path,
        "floats": [(type(x), x) for x in (cfg.optimizer.lr, cfg.kd.temperature)],
        "cache": cfg.kd.cache,
        "precision": (cfg.mixed_precision.bf16, cfg.mixed_precision.grad_reduce_in_fp32),
        "overlap": (cfg.comm_overlap.tp_comm_overlap, cfg.comm_overlap.bucket_size),
        "sources": {value.key: value.source for value in values},
    }


def test_values_become_what_the_field_holds(tmp_path: Path):
    got = run(in_rank_conversions, tmp_path)
    assert got["dtypes"] and got["activation"]
    assert got["lengths"] == (256, 256)  # the reference follows the argument, which wins over the YAML
    assert got["blend"] == (["/a", "/b"], [0.5, 0.5])
    assert got["data_path"] == "/corpora/x"
    assert got["floats"] == [(float, 1.0), (float, 2.0)]
    assert got["cache"] == ["a", "b"]
    assert got["precision"] == (True, False)  # the rest of bf16_mixed stays
    assert got["overlap"] == (True, 7)
    yaml = tmp_path / "run.yaml"
    assert got["sources"]["model.seq_length"] == "argument 'model.seq_length=256'"
    assert got["sources"]["dataset.seq_length"] == f"{yaml}:2"
    assert got["sources"]["kd.temperature"] == f"{yaml}:4"
    assert got["sources"]["mixed_precision.grad_reduce_in_fp32"] == f"{yaml}:5"


def in_rank_replaced_section(folder: Path) -> list:
    from megatron_kd.errors import ConfigError

    yaml = f"""\
model: {{seq_length: 128}}
dataset: {{_target_: {SFT}, dataset_root: "/data/${{model.seq_length}}", seq_length: "${{model.seq_length}}", seed: 5}}
"""
    cfg, values = load("model.seq_length=256", "dataset.num_workers=3", "dataset.seed=6", yaml=yaml, folder=folder)
    with pytest.raises(ConfigError, match="argument 'dataset.num_wrokers=3': unknown key .* dataset.num_workers"):
        load("dataset.num_wrokers=3", yaml=yaml, folder=folder)
    other, _ = load(f"dataset={{_target_: {SFT}, seq_length: 64}}", yaml=yaml, folder=folder)
    dataset, said = cfg.dataset, {value.key: value.source for value in values}
    return [
        (type(dataset).__name__, dataset.dataset_root, dataset.seq_length, dataset.seed, dataset.num_workers),
        (said["dataset.seed"], "dataset.dataset_root" in said),
        (other.dataset.seq_length, other.dataset.dataset_root),
    ]


def test_an_object_with_references_replaces_the_recipes_and_takes_later_settings(tmp_path: Path):
    """Nothing of the recipe's own dataset, of another kind, is left in it."""
    replaced, said, other = run(in_rank_replaced_section, tmp_path)
    assert replaced == ("GPTSFTDatasetConfig", "/data/256", 256, 6, 3)
    assert said == ("argument 'dataset.seed=6'", False)
    assert other == (64, None)


def in_rank_round_trip(folder: Path) -> None:
    from megatron_kd.bridge.config import KDConfig, KDConfigContainer

    cfg, _ = load(CACHE, "kd.top_k=64", "model.params_dtype=bf16")
    cfg.to_yaml(str(folder / "saved.yaml"))
    read = KDConfigContainer.from_yaml(str(folder / "saved.yaml"))
    assert type(read) is KDConfigContainer
    assert read.kd == KDConfig(cache="/cache", top_k=64)
    assert read.to_dict() == cfg.to_dict()

    # A saved configuration is also a --config-file, as strict as any.
    from megatron_kd.bridge.config import ConfigError, load_config

    again, _ = load_config(RECIPE, config_file=folder / "saved.yaml")
    assert again.to_dict() == cfg.to_dict()
    for old, new, expected in [
        ("train_iters:", "train_itres:", "train_itres"),
        ("train_iters: 1000000", "train_iters: many", "train.train_iters expects int"),
    ]:
        (folder / "bad.yaml").write_text((folder / "saved.yaml").read_text().replace(old, new))
        with pytest.raises(ConfigError, match=expected):
            load_config(RECIPE, config_file=folder / "bad.yaml")


def test_survives_bridges_yaml_and_can_be_run_again(tmp_path: Path):
    run(in_rank_round_trip, tmp_path)


def in_rank_wrapping() -> None:
    import dataclasses

    from megatron.bridge.recipes.gpt.h100.vanilla_gpt import vanilla_gpt_pretrain_1gpu_h100_bf16_config

    from megatron_kd.bridge.config import KDConfigContainer

    stock = vanilla_gpt_pretrain_1gpu_h100_bf16_config()
    stock.data_parallel_size = 3
    wrapped = KDConfigContainer.wrap(stock)
    for field in dataclasses.fields(stock):
        assert getattr(wrapped, field.name) is getattr(stock, field.name), field.name
    assert wrapped.data_parallel_size == 3 and wrapped.kd is None


def test_wrapping_a_stock_container_loses_nothing():
    run(in_rank_wrapping)


# ---- what is refused while loading ----


REFUSED = {
    # arguments or YAML: what the message must hold
    "train.train_itres=5": ["unknown key train.train_itres", "Did you mean train.train_iters"],
    "+train.train_itres=5": ["'+train.train_itres=5'", "unknown key train.train_itres", "train.train_iters"],
    "++model.num_layer=5": ["unknown key model.num_layer.", "model.num_layers"],
    "train.lr=1": ["unknown key train.lr", "optimizer.lr"],
    "trian.train_iters=5": ["unknown key trian", "train"],
    "kd.cachee=x": ["unknown key kd.cachee", "kd.cache"],
    "_checkpoint_load_required=true": ["unknown key _checkpoint_load_required"],
    "comm_overlap.tp_comm_overlop=true": ["comm_overlap.tp_comm_overlap"],
    "comm_overlap.bucket_size=5": ["comm_overlap was off", "comm_overlap.tp_comm_overlap"],
    "train.train_iters=many": ["train.train_iters expects int or null", "'many' (str)"],
    "train.train_iters=true": ["train.train_iters expects int or null", "True (bool)"],
    "train.train_iters=1.5": ["train.train_iters expects int or null", "1.5 (float)"],
    "train.manual_gc=1": ["train.manual_gc expects bool", "1 (int)"],
    "dataset.split=99": ["dataset.split expects str", "99 (int)", "Quote it"],
    "model.seq_length=null": ["model.seq_length expects int, found null"],
    "train=5": ["train expects TrainingConfig", "5 (int)"],
    "model=null": ["model expects GPTModelProvider", "null"],
    "kd.loss=fancy": ["kd.loss expects 'fused' or 'dense' or 'forward_chunked'", "'fancy'"],
    "kd.cache=[1,2]": ["kd.cache expects str or list of str or null", "[1, 2] (list)"],
    "model.params_dtype=float33": ["model.params_dtype expects dtype", "float33"],
    "model.activation_func=print": ["model.activation_func expects Callable", "print"],
    "env_vars.A=[1]": ["env_vars expects dict of str, str or int or float or bool"],
    "model={_target_: os.system, command: ls}": ["model cannot be built", "os.system", "allowlist"],
    "model={_target_: torch.nn.Linear, in_features: 1, out_features: 1}": ["is no dataclass", "Linear"],
    "dataset.seq_length=${model.seq_lenth}": ["dataset.seq_length", "model.seq_lenth", "not found"],
    "train:\n  train_itres: 5\n": ["run.yaml:2: unknown key train.train_itres", "train.train_iters"],
    "model:\n  a:\n    b: 1\n": ["run.yaml:2: unknown key model.a"],
    "train.train_iters: 5\n": ["run.yaml:1", "train: {train_iters: ...}"],
    "kdd: {cache: x}\n": ["run.yaml:1: unknown key kdd", "kd"],
    "train:\n\n  train_iters: 5e1\n": ["run.yaml:3: train.train_iters expects int or null, found 50.0 (float)"],
    "train: {train_iters: [5]}\n": ["run.yaml:1: train.train_iters expects int or null, found [5] (list)"],
    "recipe: os:getcwd\n": ["os:getcwd in a YAML file would import code", "--recipe os:getcwd"],
    "recipe: 5\n": ["run.yaml:1: recipe expects text, found 5"],
}


def in_rank_refusals(folder: Path) -> dict[str, str]:
    from megatron_kd.errors import UserError

    messages = {}
    for wrong in REFUSED:
        kwargs = {"yaml": wrong, "folder": folder} if wrong.endswith("\n") else {}
        try:
            load(*([] if kwargs else [wrong]), recipe=None if wrong.startswith("recipe") else RECIPE, **kwargs)
            messages[wrong] = "nothing was raised"
        except UserError as error:
            messages[wrong] = str(error)
    return messages


@pytest.fixture(scope="module")
def refusals(tmp_path_factory) -> dict[str, str]:
    return run(in_rank_refusals, tmp_path_factory.mktemp("refusals"))


@pytest.mark.parametrize("wrong", REFUSED)
def test_what_cannot_be_meant_is_refused_by_name(refusals: dict[str, str], wrong: str):
    for part in REFUSED[wrong]:
        assert part in refusals[wrong]
    if not wrong.endswith("\n"):
        assert wrong in refusals[wrong]  # the argument, so that it can be found in a long command


def in_rank_misspell_every_key() -> tuple[int, list[str]]:
    """Drops a letter of every seventh key there is: (how many, those whose message does not name both)."""
    from megatron_kd.bridge.overrides import known_keys
    from megatron_kd.errors import ConfigError

    keys = list(known_keys(load()[0]))[::7]
    known = {key[:-1]: {k[-1] for k in known_keys(load()[0]) if k[:-1] == key[:-1]} for key in keys}
    bad, tried = [], 0
    for key in keys:
        wrong = key[-1][:-2] + key[-1][-1]
        if len(wrong) < 3 or wrong in known[key[:-1]]:
            continue
        tried += 1
        path = ".".join((*key[:-1], wrong))
        try:
            load(f"{path}=1")
            bad.append(path)
        except ConfigError as error:
            if f"unknown key {path}." not in str(error) or ".".join(key) not in str(error):
                bad.append(str(error))
    return tried, bad


def test_every_misspelt_key_meets_its_neighbour():
    tried, bad = run(in_rank_misspell_every_key)
    assert tried > 80 and not bad


# ---- what is refused before a run starts ----


SFT = "megatron.bridge.data.builders.gpt_sft.GPTSFTDatasetConfig"
UNSUPPORTED = {
    "ddp.average_in_collective=true": "ddp.average_in_collective=True with model.calculate_per_token_loss=True",
    "model.overlap_moe_expert_parallel_comm=true": "model.overlap_moe_expert_parallel_comm=True",
    "model.cuda_graph_impl=local": "model.cuda_graph_impl='local'",
    "model.fp8_output_proj=true": "model.fp8_output_proj=True",
    "model.use_mup=true": "model.use_mup=True",
    "dataset.dataloader_type=external": "dataset.dataloader_type='external'",
    "ddp.use_megatron_fsdp=true": "ddp.use_megatron_fsdp=True",
    "dist.use_torch_fsdp2=true": "dist.use_torch_fsdp2=True",
    "peft={_target_: megatron.bridge.peft.lora.LoRA}": "peft",
    "dist.use_decentralized_pg=true": "dist.use_decentralized_pg=True",
}
MISFITS = {
    ("model.seq_length=128",): (8, ["model.seq_length=128", "dataset.seq_length=32768"]),
    ("checkpoint.pretrained_checkpoint=/nope",): (8, ["checkpoint.pretrained_checkpoint=/nope", "does not exist"]),
    ("checkpoint.pretrained_checkpoint=/nope", "tokenizer.use_tokenizer_vocab_size=true"): (
        8,
        ["tokenizer.use_tokenizer_vocab_size=True", "model.vocab_size", "Set it to false"],
    ),
    ("checkpoint.load=/nope",): (8, ["checkpoint.load=/nope", "does not exist"]),
    (f"checkpoint.load={Path(__file__).parent}",): (8, ["checkpoint.load=", "without a checkpoint"]),
    (): (6, ["6 ranks do not split into TP=4 PP=1 CP=1 EP=8", "TP*PP*CP = 4", "8 or 16"]),
    ("model.expert_model_parallel_size=3",): (
        4,
        ["model.num_moe_experts=32 does not split into EP = 3", "1, 2, 4, 8"],
    ),
    ("train.global_batch_size=7",): (8, ["train.global_batch_size=7", "micro_batch_size * DP = 1 * 2", "6 would fit"]),
    ("kd.temperature=0",): (8, ["kd.temperature must be a finite number, above 0", "0.0"]),
    ("kd.kd_weight=0",): (8, ["kd.kd_weight and kd.ce_weight are both 0"]),
    ("kd.kd_weight=-1",): (8, ["kd.kd_weight", "-1.0"]),
    ("kd.kd_weight=nan",): (8, ["kd.kd_weight", "nan"]),
    ("kd.top_k=0",): (8, ["kd.top_k must be a finite number, above 0"]),
    ("kd.cache=null",): (8, ["kd.cache is not set", "kd: null"]),
    ("dataset.data_path=null",): (8, ["dataset.data_path is not set", "kd.cache=/cache belongs to a corpus"]),
    ("kd.divergence=forward_lk",): (
        8,
        ["kd.divergence: expected", "found 'forward_lk'. Did you mean 'forward_kl'", "package.module:function"],
    ),
    ("kd.divergence=os:system",): (8, ["kd.divergence='os:system'", "allowlist"]),
    ("model.pipeline_model_parallel_size=2", "model.virtual_pipeline_model_parallel_size=2", "comm_overlap=null"): (
        8,
        ["model.virtual_pipeline_model_parallel_size=2 on 2 stages", "model.overlap_p2p_comm=true"],
    ),
    ("model.calculate_per_token_loss=false", "dataset.eod_mask_loss=true"): (
        8,
        ["model.calculate_per_token_loss=False with dataset.eod_mask_loss=True", "divided once"],
    ),
    ("model.calculate_per_token_loss=false", "kd.context=exact"): (8, ["kd.context=exact", "expected true"]),
    ("model.calculate_per_token_loss=false", f"dataset={{_target_: {SFT}, seq_length: 128}}"): (8, ["dataset GPTSFT"]),
    ("model.num_attention_heads=10",): (8, ["model.num_attention_heads=10 does not split into TP = 4"]),
    ("ddp.grad_reduce_in_fp32=false",): (
        8,
        ["ddp.grad_reduce_in_fp32=false would become true", "write mixed_precision.grad_reduce_in_fp32=false"],
    ),
    ("model.bf16=false",): (8, ["model.bf16=false would become true", "mixed_precision"]),
    ("dataset.sequence_length=5",): (8, ["dataset.sequence_length=5 would become 32768", "set that"]),
    ("optimizer.overlap_param_gather=false",): (8, ["optimizer.overlap_param_gather=false would become true", "ddp."]),
}


def in_rank_checks() -> dict:
    from megatron_kd.bridge.config import check_before_start, refuse_unsupported
    from megatron_kd.errors import ConfigError

    messages = {}
    for wrong in UNSUPPORTED:
        cfg, _ = load(CACHE, wrong)
        with pytest.raises(ConfigError) as refused:
            refuse_unsupported(cfg)
        messages[wrong] = str(refused.value)
        cfg.kd = None
        refuse_unsupported(cfg)  # without distillation everything is Bridge's own affair
    for wrong, (world_size, _) in MISFITS.items():
        corpus = [] if any(word.startswith("dataset={") for word in wrong) else ["dataset.data_path=/data/x"]
        cfg, values = load(CACHE, *corpus, *wrong)
        dryrun.prepare_model(cfg.model)  # only Transformer Engine's kernels; they cannot be validated without it
        with pytest.raises(ConfigError) as refused:
            check_before_start(cfg, values, world_size=world_size)
        messages[wrong] = str(refused.value)
    return messages


@pytest.fixture(scope="module")
def checks() -> dict:
    return run(in_rank_checks)


@pytest.mark.parametrize("wrong", UNSUPPORTED)
def test_unsupported_settings_are_refused_by_name(checks: dict, wrong: str):
    assert UNSUPPORTED[wrong] in checks[wrong] and "expected" in checks[wrong]


@pytest.mark.parametrize("wrong", MISFITS, ids=str)
def test_misfits_are_refused_before_anything_starts(checks: dict, wrong: tuple[str, ...]):
    for part in MISFITS[wrong][1]:
        assert part in checks[wrong]


def in_rank_other_models() -> list[str]:
    from megatron.bridge.models.gemma.gemma2_provider import Gemma2ModelProvider
    from megatron.bridge.models.gemma.gemma3_provider import Gemma3ModelProvider
    from megatron.bridge.models.mla_provider import MLAModelProvider
    from megatron.bridge.models.qwen_vl.qwen25_vl_provider import Qwen25VLModelProvider

    from megatron_kd.bridge.config import refuse_unsupported
    from megatron_kd.errors import ConfigError

    cfg, _ = load(CACHE)
    shape = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    messages = []
    for kind in (Gemma2ModelProvider, Qwen25VLModelProvider, Gemma3ModelProvider, MLAModelProvider):
        cfg.model = kind(**shape)
        try:
            refuse_unsupported(cfg)
        except ConfigError as error:
            messages.append(str(error))
    return messages


def test_models_that_build_other_heads_or_more_than_a_gpt_are_refused():
    """Gemma 2 caps its logits, Qwen 2.5 VL has eyes; Gemma 3 and latent attention are GPT models like others."""
    capped, vision = run(in_rank_other_models)
    assert "model.final_logit_softcapping=30.0" in capped
    assert "model Qwen25VLModelProvider" in vision


def in_rank_preview() -> None:
    import os

    import torch

    from megatron_kd.bridge.config import check_before_start, check_final, finalise_preview

    # What the message says helps, helps; and a user's value that nothing touches passes.
    cfg, values = load(
        CACHE,
        "mixed_precision.grad_reduce_in_fp32=false",
        "mixed_precision.params_dtype=bf16",
        "dataset.data_path=/data/x",
        "dataset.blend=null",
        "optimizer.lr=1e-4",
        "env_vars.MEGATRON_KD_TEST=1",
    )
    dryrun.prepare_model(cfg.model)
    before, environment = cfg.to_dict(), dict(os.environ)
    final = finalise_preview(cfg, world_size=8)
    assert final.ddp.grad_reduce_in_fp32 is False and final.data_parallel_size == 2
    assert final.dataset.blend == (["/data/x"], None)
    assert cfg.to_dict() == before and dict(os.environ) == environment
    assert not torch.are_deterministic_algorithms_enabled()

    cfg, values = load(CACHE, "optimizer.lr=1e-4", "mixed_precision=bf16_mixed", "dataset.blend=[[/a],null]")
    dryrun.prepare_model(cfg.model)
    check_before_start(cfg, values, world_size=16)

    # The same check inside the loop: a value changed late is found without the configuration from before.
    final = finalise_preview(cfg, world_size=16)
    check_final(final, values)
    final.optimizer.lr = 5.0
    with pytest.raises(Exception, match=r"optimizer\.lr=0\.0001 would become 5\.0"):
        check_final(final, values)


def test_the_preview_changes_nothing_and_agrees_with_the_advice():
    run(in_rank_preview)


# ---- the run's folder ----


def in_rank_run_dir(folder: Path) -> None:
    import os

    from megatron_kd.bridge.recipes import build_recipe

    os.chdir(folder)
    stock = build_recipe("gpt_oss_20b_pretrain_16gpu_h100_bf16_config")
    assert stock.checkpoint.load == str(folder / "nemo_experiments/default/checkpoints")  # the trap

    # Nothing is loaded or written unless said so, and what the recipe itself says stays.
    cfg, _ = load(recipe=stock)
    assert (cfg.checkpoint.load, cfg.checkpoint.save, cfg.logger.tensorboard_dir) == (None, None, None)
    stock.checkpoint.save = "/mine"
    assert load(recipe=stock)[0].checkpoint.save == "/mine"

    # One folder holds everything; a checkpoint in it is gone on from.
    run_dir = folder / "runs" / "one"
    cfg, _ = load(recipe=stock, run_dir=Path("runs/one"))
    assert cfg.checkpoint.save == str(run_dir / "checkpoints") and cfg.checkpoint.load is None
    assert Path(cfg.logger.tensorboard_dir).parent == run_dir
    assert Path(cfg.logger.save_config_filepath).parent == run_dir
    (run_dir / "checkpoints").mkdir(parents=True)
    assert load(recipe=stock, run_dir=run_dir)[0].checkpoint.load is None  # an empty folder is no checkpoint
    (run_dir / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("5")
    assert load(recipe=stock, run_dir=run_dir)[0].checkpoint.load == str(run_dir / "checkpoints")
    cfg, _ = load("checkpoint.load=null", recipe=stock, run_dir=run_dir)  # what the user says wins
    assert cfg.checkpoint.load is None


def test_each_run_has_a_folder_and_resumes_only_from_it(tmp_path: Path):
    run(in_rank_run_dir, tmp_path)
