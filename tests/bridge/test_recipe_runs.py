# SPDX-License-Identifier: Apache-2.0
"""The files of recipes/ as a user goes through them, shrunk: the cache, training from it, resuming a killed run."""

import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from megatron_kd import dryrun
from megatron_kd.cache import CacheReader
from megatron_kd.cli import main
from tests.bridge.loop import killer
from tests.bridge.test_recipes import ROOT, RUNS, in_rank_yaml, run, world_size
from tests.cache.conftest import write_corpus
from tests.dryrun.tiny import VOCABULARY, Recorder, write_tiny_gpt_oss, write_tiny_llama

CACHES = {  # the models that the recipes' runs start from, and the recipe that caches their teacher
    "openai/gpt-oss-20b": "gpt_oss_20b_cache_8gpu_h200.yaml",
    "openai/gpt-oss-120b": "gpt_oss_120b_cache_8gpu_h200.yaml",
    "meta-llama/Llama-3.2-3B": "llama31_8b_cache_8gpu_h200.yaml",
}
KILLED_AFTER = 3
"""Steps of five; checkpoints are written every second."""


def write_models(root: Path) -> None:
    write_tiny_gpt_oss(root / "gpt_oss", seed=1)
    write_tiny_llama(root / "llama", seed=1, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """A corpus, and the caches that the cache recipes make of it with a tiny teacher, on two ranks for eight GPUs."""
    root = tmp_path_factory.mktemp("recipes")
    dryrun.run_ranks(write_models, 1, args=(root,))
    random = np.random.default_rng(0)
    write_corpus(root / "corpus", [random.integers(2, VOCABULARY, length) for length in random.integers(20, 300, 40)])
    for name in set(CACHES.values()):
        teacher = root / ("llama" if "llama" in name else "gpt_oss")
        words = ["cache", "build", "--config-file", ROOT / "recipes" / name, "--teacher", teacher]
        words += ["--corpus", root / "corpus", "--out", root / name, "--accept-teacher-loss", "--no-progress"]
        if "gpt_oss" in name:
            words += ["--cpu-ranks", "2", "model.expert_model_parallel_size=2"]
        assert main([str(word) for word in words]) == 0
        manifest = CacheReader(root / name).manifest
        assert manifest.top_k == 100 and manifest.teacher["dtype"] == "bfloat16"
    return root


def in_rank_train(path: Path, root: Path, cache: Path, run_dir: Path | None, kill: bool) -> list[dict[str, float]]:
    from megatron_kd.bridge.config import load_config
    from megatron_kd.bridge.train import train

    overrides = [f"kd.cache={cache}", f"dataset.data_path={root / 'corpus'}", 'dataset.split="100,0,0"']
    cfg, _ = load_config(config_file=path, overrides=overrides)
    cfg.tokenizer.tokenizer_type, cfg.tokenizer.tokenizer_model = "HuggingFaceTokenizer", str(root / "gpt_oss")
    cfg.model.vocab_size = VOCABULARY
    dryrun.shrink(cfg)
    dryrun.prepare(cfg)
    cfg.dataset.path_to_cache = str(root / "index")
    if run_dir is not None:
        cfg.checkpoint.save = cfg.checkpoint.load = str(run_dir)
        cfg.checkpoint.save_interval = 2
    recorder = Recorder()
    train(cfg, callbacks=[recorder, *([killer(KILLED_AFTER)] if kill else [])])
    return recorder.steps


def in_rank_ranks(path: Path) -> int:
    from megatron_kd.bridge.commands import Request
    from megatron_kd.bridge.rehearsal import check

    return check(Request(None, None, path, ()), None, world_size(path))[0]


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_every_recipe_trains_from_its_recipes_cache_and_resumes(inputs, tmp_path):
    """Recipes whose shrunk twins are the same, setting by setting, run once."""
    loaded = run(in_rank_yaml, [path for path in RUNS if "gpu_" in path.name])
    twins = {digest: (ROOT / "recipes" / name, CACHES[model]) for name, (model, _, digest) in loaded.items()}
    assert {cache for _, cache in twins.values()} == set(CACHES.values())
    for path, cache in twins.values():
        train = partial(train_recipe, path, inputs, inputs / cache)
        whole, run_dir = train(None), tmp_path / path.stem
        assert len(whole) == 5 and all(0 < step["kd loss"] < 10 for step in whole), path.name
        with pytest.raises(dryrun.RankFailed, match="exit code -9"):
            train(run_dir, kill=True)
        assert train(run_dir) == [pytest.approx(step, abs=1e-6) for step in whole[2:]], path.name
        shutil.rmtree(run_dir)


def train_recipe(path: Path, root: Path, cache: Path, run_dir: Path | None, kill: bool = False) -> list[dict]:
    """Losses and gradient norm of each step, of the last pipeline stage."""
    args = (path, root, cache, run_dir, kill)
    steps = dryrun.run_ranks(in_rank_train, run(in_rank_ranks, path), args=args, env={"HF_HUB_OFFLINE": "1"})[-1]
    return [{name: value for name, value in step.items() if not name.endswith(" seconds")} for step in steps]
