# SPDX-License-Identifier: Apache-2.0
"""The plan of a comparison and its tables, from plain values."""

import csv

import pytest

from megatron_kd.compare.methods import METHODS, Run, is_sweep, plan
from megatron_kd.compare.results import absent, first_difference, step_table, summary_table, write_csv
from megatron_kd.errors import ConfigError


def result(name, *losses, norm=1.0):
    steps = [{"step": i, "kd loss": x, "total loss": x, "grad norm": norm} for i, x in enumerate(losses, start=1)]
    return {"name": name, "method": name, "steps": steps, "summary": steps[-1] | {"peak bytes": 3 << 30}}


def test_what_cannot_be_had_is_left_out_and_named():
    runs, left_out = plan(None, [], has_cache=True, teacher=None)
    assert {run.name for run in runs} | set(left_out) == set(METHODS)
    assert left_out["online"] == left_out["modelopt"] == "needs --teacher FOLDER"
    runs, left_out = plan(None, [], has_cache=False, teacher="/t")
    assert [run.name for run in runs][:2] == ["megatron", "online"] and "fused" in left_out
    assert runs[1].overrides == ("kd.cache=null", "kd.teacher=/t")


def test_a_sweep_of_kd_is_every_combination_of_every_method_that_distils():
    sweep = ["kd.divergence=forward_kl,jsd", "kd.top_k=20,50"]
    runs, _ = plan(None, sweep, has_cache=True, teacher=None)
    assert [run.name for run in runs] == [
        f"fused kd.divergence={divergence} kd.top_k={k}" for divergence in ("forward_kl", "jsd") for k in (20, 50)
    ]
    assert len({run.folder for run in runs}) == 4 and not any(" " in run.folder for run in runs)
    runs, _ = plan(["megatron", "dense"], ["kd.top_k=20,50"], has_cache=True, teacher=None)
    assert [run.name for run in runs] == ["megatron", "dense kd.top_k=20", "dense kd.top_k=50"]
    assert runs[1].overrides == ("kd.loss=dense", "kd.top_k=20")


def test_a_sweep_over_packing_is_of_every_method_and_needs_no_second_setting():
    packing = "dataset.enable_offline_packing"
    runs, _ = plan(["megatron", "fused"], [f"{packing}=false,true", "kd.top_k=20,50"], has_cache=True, teacher=None)
    assert [run.swept for run in runs[:2]] == [(f"{packing}=False",), (f"{packing}=True",)] and len(runs) == 6
    for run in runs:
        assert ("dataset.offline_packing_specs=null" in run.overrides) == (f"{packing}=False" in run.swept)


def test_what_is_no_method_or_no_sweep_is_refused():
    with pytest.raises(ConfigError, match="--methods fusd: unknown"):
        plan(["fusd"], [], has_cache=True, teacher=None)
    for argument in ("kd.top_k=range(1,5)", "kd.top_k"):
        with pytest.raises(ConfigError, match="--sweep kd.top_k"):
            is_sweep(argument)
    assert not is_sweep("dataset.split='80,20,0'") and not is_sweep("kd.cache_weights=[1,2]") and is_sweep("a=1,2")


def test_the_first_difference_names_step_and_figure():
    reference = result("dense", 2.0, 1.0, 0.5)
    assert first_difference(reference, result("fused", 2.0 + 1e-4, 1.0, 0.5), 1e-4) is None  # relative above 1
    text = first_difference(reference, result("fused", 2.0, 1.001, 0.6), 1e-4)
    assert text.startswith("step 2: kd loss of fused is 1.001, of dense 1;")
    assert "grad norm" in first_difference(reference, result("fused", 2.0, 1.0, 0.5, norm=1.1), 1e-4)
    assert "2 steps, dense 3" in first_difference(reference, result("fused", 2.0, 1.0), 1e-4)
    assert first_difference(reference, result("fused", float("nan"), 1.0, 0.5), 1e9)


def test_tables_and_csv_hold_the_figures(tmp_path):
    found = [result("dense", 2.0, 1.0, 0.5), result("fused", 2.0, 1.0, 0.25)]
    table = summary_table(found).splitlines()
    assert table[0].split() == ["method", "kd", "loss", "total", "grad", "norm", "peak", "memory"]
    assert table[3].split() == ["fused", "0.2500", "0.2500", "1.000", "3.00", "GiB"]
    (missing,) = absent(found)
    assert "held-out" in missing and "dataset.split" in missing
    many = [result("a", *range(100))]
    assert len(step_table(many, most=5).splitlines()) == 7
    write_csv(tmp_path / "x.csv", found)
    with (tmp_path / "x.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6 and rows[-1]["name"] == "fused" and float(rows[-1]["kd loss"]) == 0.25


def test_a_runs_name_is_its_folder_without_blanks():
    assert Run("fused", ("kd.top_k=20",)).folder == "fused_kd.top_k=20"
