# SPDX-License-Identifier: Apache-2.0
"""The command line as a user meets it: help, mistakes, and `train --dry-run` and `--print-config` on CPU ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron_kd import __version__
from megatron_kd.cli import main
from tests.cache.conftest import build, random_documents, write_corpus

ROOT = Path(__file__).parent.parent.parent
RECIPE = "gpt_oss_20b_pretrain_8gpu_h200_bf16_kd_config"
CACHE_BUILD = ["cache", "build", "--corpus", "/no/corpus", "--out", "/no/cache"]
GPT_OSS = str(ROOT / "recipes" / "gpt_oss_20b_pretrain_8gpu_h200_bf16_kd_pruned.yaml")


def call(*argv: object) -> int:
    """The exit code of `megatron-kd argv`, in this process."""
    try:
        return main([str(word) for word in argv])
    except SystemExit as stopped:
        return stopped.code


@pytest.mark.parametrize(
    "command",
    [[], ["train"], ["cache"], ["cache", "build"], ["cache", "info"], ["demo"], ["submit"], ["doctor"], ["bench"]],
    ids=str,
)
def test_help_is_read_without_torch(command: list[str]):
    code = f"""
import sys
from megatron_kd.cli import main
try:
    main({[*command, "--help"]!r})
except SystemExit as stopped:
    assert stopped.code == 0
heavy = {{"torch", "transformers", "megatron", "hydra", "matplotlib"}} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: megatron-kd " + " ".join(command))
    assert max(map(len, done.stdout.splitlines())) <= 119


@pytest.mark.parametrize(("module", "extra"), [("hydra", "teacher"), ("transformers", "teacher")])
def test_a_package_that_is_not_there_is_named_with_what_brings_it(tmp_path, module, extra):
    corpus = write_corpus(tmp_path / "corpus", random_documents(1, count=5))
    (tmp_path / "teacher").mkdir()
    (tmp_path / "teacher" / "config.json").write_text("{}")
    words = ["cache", "build", "--teacher", tmp_path / "teacher", "--corpus", corpus.prefix, "--out", tmp_path / "c"]
    code = f"""
import importlib.abc, sys
from megatron_kd.cli import main
class Without(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            raise ModuleNotFoundError(f"No module named {module!r}", name=name)
sys.meta_path.insert(0, Without())
sys.exit(main({[*map(str, words)]}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 2
    assert done.stderr == f"megatron-kd: {module} is not installed here: pip install 'megatron-kd[{extra}]'\n"


@pytest.mark.parametrize("command", [["cache", "info", "CACHE", "--json"], ["cache", "build", "--help"]], ids=str)
def test_output_that_nobody_reads_to_its_end_is_no_error(tmp_path, command):
    """As in `megatron-kd cache info DIR | head -1`."""
    build(tmp_path / "cache", write_corpus(tmp_path / "corpus", random_documents(1, count=5)), top_k=3)
    words = [str(tmp_path / "cache") if word == "CACHE" else word for word in command]
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "megatron_kd.cli", *words],
            stdout=write,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            timeout=60,
        )
    finally:
        os.close(write)
    assert done.stderr == b"" and done.returncode in (0, 141)  # argparse itself ignores a closed pipe


def test_version(capsys):
    assert call("--version") == 0
    assert capsys.readouterr().out == f"megatron-kd {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (
            ["train", "--conifg-file", "x"],
            ["megatron-kd train: unknown option --conifg-file", "Did you mean --config-file"],
        ),
        (["train", "--dryrun", "kd.cache=x"], ["--dryrun", "--dry-run"]),
        (["train", "--config", "x"], ["unknown option --config.", "--config-file"]),  # no abbreviations
        (["cache", "build", "--techer", "x"], ["unknown option --techer", "--teacher"]),
        (["trian"], ["'trian'", "train"]),
        (["cache", "info", "a", "b"], ["unexpected argument 'b'"]),
        (["train", "--ranks", "2"], ["--ranks", "--dry-run"]),
        (["train", "--config-file", "/no/run.yaml"], ["/no/run.yaml cannot be read"]),
        (["train", "--recipe", RECIPE, "train.train_iters"], ["argument 'train.train_iters' is not key=value"]),
        (["train", "--recipe", RECIPE, "a=1"], ["unknown key a"]),
        (["train", "--recipe", RECIPE, "kd=null"], ["Transformer Engine", "--dry-run", "--cpu"]),
        (["train", "--check-only"], ["no recipe: give --recipe NAME"]),
        (["train", "--check-only", "--recipe", RECIPE, "kd.cache=/no/cache"], ["node ", "/no/cache"]),
        (
            [
                "train",
                "--check-only",
                "--recipe",
                RECIPE,
                "--world-size",
                "6",
                "--run-dir",
                "x",
                "model.context_parallel_size=4",
            ],
            ["CP=4"],
        ),
        (["train", "--dry-run", "--recipe", RECIPE + "s"], [f"unknown recipe '{RECIPE}s'. Did you mean {RECIPE}"]),
        (["train", "--check-only", "--world-size", "0"], ["--world-size 0: expected at least 1"]),
        (["compare", "--dry-run", "--recipe", "zzz"], ["unknown recipe 'zzz'. Ours: "]),
        (["export", "--run-dir", "tests", "--out", "/no"], ["tests holds no checkpoint: expected folders iter_*"]),
        (CACHE_BUILD + ["--teacher", "tests"], ["--teacher tests holds no Hugging Face model: expected config.json"]),
        (["train", "--check-only", "--recipe", RECIPE, "kd=null"], ["0 GPUs for 1 ranks", "MEGATRON_KD_CPU=1"]),
        (
            ["train", "--check-only", "--cpu", "--recipe", RECIPE, "--run-dir", "/proc/no", "kd=null"],
            ["/proc/no", "cannot be written"],
        ),
    ],
    ids=str,
)
def test_mistakes_end_with_2_and_say_what_to_do(capsys, argv: list[str], parts: list[str]):
    assert call(*argv) == 2
    out, err = capsys.readouterr()
    assert not out and "Traceback" not in err
    for part in parts:
        assert part in err


def test_a_rank_says_which_it_is(capsys, monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "5")
    assert call("train", "--config-file", "/no/run.yaml") == 2
    assert capsys.readouterr().err.startswith("megatron-kd rank 5: ")


def test_a_default_folder_for_each_run(monkeypatch):
    from megatron_kd.bridge.commands import Request, default_run_dir
    from megatron_kd.errors import UserError

    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    by_recipe, by_file = Request("hf:/models/x", None, None, ()), Request(None, None, Path("recipes/a_b.yaml"), ())
    assert default_run_dir(by_recipe, 1).name.startswith("hf-models-x-2")
    with pytest.raises(UserError, match="--run-dir is needed"):
        default_run_dir(by_recipe, 2)
    monkeypatch.setenv("SLURM_JOB_ID", "77")  # the same again when the job is requeued, and on every rank
    assert default_run_dir(by_file, 2) == Path("runs/a_b-77")


# ---- with Megatron-Bridge on CPU ranks ----


def test_print_config_can_be_run_again(capsys, tmp_path: Path):
    assert call("train", "--config-file", GPT_OSS, "--print-config", "kd.cache=/cache", "optimizer.lr=7e-5") == 0
    text = capsys.readouterr().out
    printed = yaml.safe_load(text)
    assert printed["kd"]["cache"] == "/cache" and printed["optimizer"]["lr"] == 7e-5
    assert printed["dataset"]["seq_length"] == printed["model"]["seq_length"] == 32768
    saved = tmp_path / "saved.yaml"
    saved.write_text(text)
    recipe = "gpt_oss_20b_pretrain_8gpu_h200_bf16_kd_config"
    assert call("train", "--recipe", recipe, "--config-file", saved, "--print-config") == 0
    assert capsys.readouterr().out == text


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["kd.cachee=/cache"], ["unknown key kd.cachee", "kd.cache"]),
        (["kd.cache=/no/cache"], ["/no/cache"]),
        (["--world-size", "6"], ["6 ranks do not split", "TP=4", "8 or 16"]),
        (["ddp.grad_reduce_in_fp32=false"], ["mixed_precision.grad_reduce_in_fp32=false"]),
        (["ddp.use_megatron_fsdp=true"], ["ddp.use_megatron_fsdp=True does not work with distillation"]),
        (["--student", "/no/student"], ["student /no/student holds no config.json"]),
    ],
    ids=str,
)
def test_a_dry_run_finds_the_mistakes_of_a_run(capsys, argv: list[str], parts: list[str]):
    assert call("train", "--config-file", GPT_OSS, "--dry-run", *argv) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err
    for part in parts:
        assert part in err


@pytest.mark.parametrize(
    ("argv", "ranks"),
    [
        (["--config-file", GPT_OSS, "kd.divergence=jsd"], 2),
        (["--recipe", "gpt_oss_120b_pretrain_64gpu_h100_bf16_config", "kd.temperature=2", "kd.ce_weight=0.5"], 4),
    ],
    ids=["ours", "a stock recipe"],
)
def test_a_dry_run_trains_the_recipe_shrunk(capsys, argv: list[str], ranks: int):
    assert call("train", *argv, "--dry-run") == 0
    out = capsys.readouterr().out
    assert "kd.cache: None -> 'synthetic'  (made-up teacher rows" in out and f"Training on {ranks} CPU ranks" in out
    steps = [
        dict(part.rsplit(" ", 1) for part in line.split(": ")[1].split(", "))
        for line in out.splitlines()
        if "kd loss" in line
    ]
    assert len(steps) == 5
    ce_weight = 0.5 if "kd.ce_weight=0.5" in argv else 0.0
    for losses in steps:
        lm, kd, total = (float(losses[f"{name} loss"]) for name in ("lm", "kd", "total"))
        assert total == pytest.approx(kd + ce_weight * lm, abs=2e-4) and kd > 0
        assert lm == pytest.approx(6.24, abs=0.2)  # log of 512 ids, all as likely
