# SPDX-License-Identifier: Apache-2.0
"""`megatron-kd compare` as a user runs it, on CPU ranks: every method, one that is continued, what is refused."""

import csv
import json
import math

import pytest

from megatron_kd import cli
from megatron_kd.bridge.frequency import CLASSES
from megatron_kd.dryrun import run_ranks
from tests.compare.given import make

pytestmark = pytest.mark.slow

RECIPE = "smollm2_135m_pretrain_3cpu_fp32_kd_config"
SETTINGS = [
    "model.tensor_model_parallel_size=1", "model.sequence_parallel=false", "model.seq_length=64",
    "dataset.seq_length=64", "train.global_batch_size=4", "train.train_iters=3", "optimizer.lr=1e-3",
    "scheduler.lr_warmup_iters=1", "logger.log_interval=1", "dataset.split='80,20,0'", "validation.eval_iters=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A student, a teacher, a corpus and its cache."""
    root = tmp_path_factory.mktemp("compare")
    run_ranks(make, 1, args=(root,))
    return root


def compare(given, *more):
    words = ["compare", "--recipe", RECIPE, "--student", str(given / "student"), "--cpu-ranks", "1"]
    data = [f"kd.cache={given / 'cache'}", f"dataset.data_path={given / 'corpus'}", "kd.ce_weight=0.5"]
    return cli.main([*words, *more, *data, *SETTINGS, f"dataset.path_to_cache={given / 'index'}"])


def test_all_methods_train_and_leave_tables_that_agree_with_the_json(given, capsys):
    folder = given / "all"
    status = compare(given, "--run-dir", str(folder), "--teacher", str(given / "teacher"), "--assert-equal")
    shown = capsys.readouterr().out
    assert status == 0, shown
    found = json.loads((folder / "compare.json").read_text())
    methods = {method["name"]: method for method in found["methods"]}
    assert set(methods) == {
        "megatron", "online", "modelopt", "dense", "forward-chunked", "fused", "fused-recompute", "megatron-topk",
    }  # fmt: skip
    with (folder / "compare.csv").open() as file:
        rows = list(csv.DictReader(file))
    for name, method in methods.items():
        own = [row for row in rows if row["name"] == name]
        assert [step["step"] for step in method["steps"]] == [1, 2, 3] == [int(row["step"]) for row in own]
        for step, row in zip(method["steps"], own, strict=True):
            assert {key: float(row[key]) for key in step} == step
        summary = method["summary"]
        assert summary["grad norm"] == method["steps"][-1]["grad norm"]
        assert summary["tokens per second"] == pytest.approx(4 * 64 / summary["step seconds"])
        assert summary["held-out perplexity"] == pytest.approx(math.exp(summary["held-out lm loss"]))
        assert 0 < summary["held-out kl"] and 0 <= summary["held-out agreement"] <= 1
        classes = summary["agreement by token frequency"]
        assert classes and set(classes) <= {*CLASSES} and all(0 <= share <= 1 for share in classes.values())
        assert name in shown
    assert {"kd loss", "total loss"}.isdisjoint(methods["megatron"]["steps"][0])
    # Megatron's own loss of the cached entries, of its padded columns and with its clamp, is near the exact one.
    ours, theirs = (methods[name]["steps"][0]["kd loss"] for name in ("fused", "megatron-topk"))
    assert theirs == pytest.approx(ours, rel=2e-2) and theirs != ours
    # ModelOpt's KL over the whole vocabulary is above the top 100's.
    assert methods["modelopt"]["steps"][0]["kd loss"] > methods["online"]["steps"][0]["kd loss"] > 0


def test_a_comparison_goes_on_and_is_held_to_its_settings(given, capsys):
    folder = given / "some"
    arguments = ["--run-dir", str(folder)]
    assert compare(given, *arguments, "--methods", "fused") == 0
    before = (folder / "fused" / "result.json").stat().st_mtime_ns
    capsys.readouterr()
    assert compare(given, *arguments, "--methods", "fused,dense", "--list") == 0
    assert capsys.readouterr().out == "dense\n"
    assert compare(given, *arguments, "--methods", "fused,dense", "--assert-equal", "1e-4") == 0
    assert "fused: done before" in capsys.readouterr().out
    assert (folder / "fused" / "result.json").stat().st_mtime_ns == before
    # A result that someone changed is found out, and so are other settings.
    result = json.loads((folder / "dense" / "result.json").read_text())
    result["steps"][1]["kd loss"] += 0.01
    (folder / "dense" / "result.json").write_text(json.dumps(result))
    assert compare(given, *arguments, "--methods", "fused,dense", "--assert-equal") == 1
    assert "step 2: kd loss of dense is" in capsys.readouterr().err
    assert compare(given, *arguments, "--methods", "fused", "optimizer.weight_decay=0.5") == 2
    assert "other settings. settings:" in capsys.readouterr().err


def test_a_method_that_fails_leaves_the_others_and_is_named(given, capsys):
    folder = given / "failing"
    sweep = ["--sweep", "kd.top_k=20,30"]  # the cache has 20
    assert compare(given, "--run-dir", str(folder), *sweep) == 1
    found = json.loads((folder / "compare.json").read_text())
    assert [method["name"] for method in found["methods"]] == ["fused kd.top_k=20"]
    assert "30" in found["left_out"]["fused kd.top_k=30"]
    assert "failed:" in capsys.readouterr().out


def test_a_large_recipe_is_compared_shrunk(tmp_path, capsys):
    words = ["compare", "--dry-run", "--recipe", "gpt_oss_20b_pretrain_8gpu_h200_bf16_kd_config"]
    assert cli.main([*words, "--run-dir", str(tmp_path), "--assert-equal", "0.05"]) == 0
    found = json.loads((tmp_path / "compare.json").read_text())
    methods = {method["name"]: method["steps"] for method in found["methods"]}
    assert len(methods) == 8 and all(len(steps) == 5 for steps in methods.values())
    for name, tolerance in (("kd loss", 1e-3), ("grad norm", 1e-2)):  # at TP=2 with sequence parallelism
        assert methods["megatron-topk"][0][name] == pytest.approx(methods["fused"][0][name], rel=tolerance)
