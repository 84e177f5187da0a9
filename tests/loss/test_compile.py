# SPDX-License-Identifier: Apache-2.0
"""What Triton's compiler makes of the kernels for H200 and B200; no GPU is needed."""

import re
from dataclasses import replace

import pytest

from megatron_kd.loss.compile_kernels import TARGETS, compile_variant, main, variants

VARIANTS = {variant.name: variant for variant in variants()}


def global_accesses(ptx):
    """L, S and B for wide loads and stores of global memory and barriers, in program order."""
    wide = {"ld.global.v": "L", "st.global.v": "S", "bar.sync": "B"}
    return "".join(wide[found] for found in re.findall(r"ld\.global\.v|st\.global\.v|bar\.sync", ptx))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", VARIANTS)
def test_nothing_spills_and_an_sm_holds_eight_programs(name, target):
    """So that 1,056 rows of a strip are on 132 SMs at once."""
    made = compile_variant(VARIANTS[name], target)
    assert made.spilled == 0
    assert 16 < made.registers <= 64
    assert made.shared <= 1024
    assert made.programs >= 8
    assert ".local" not in made.ptx


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", [name for name in VARIANTS if "bf16" in name])
def test_a_tile_is_read_by_all_threads_before_any_writes_it(name, target):
    """Wide loads, a barrier, wide stores; and a barrier again before single numbers are stored over them.

    The front of a row is written while its rest is unread, so this order is what keeps the logits alive.
    """
    ptx = compile_variant(VARIANTS[name], target).ptx
    assert re.fullmatch(r"B*(L+BS+)+B+", global_accesses(ptx)), global_accesses(ptx)
    assert "cvt.rn.bf16x2.f32" in ptx  # to nearest


@pytest.mark.parametrize("name", ["statistics, label", "gradient bf16, label"])
def test_loads_are_wide_whatever_the_vocabulary(name):
    """50,257 columns in rows padded to 50,304: the loop over whole tiles has no mask to split its loads."""
    variant = next(variant for variant in variants(50_257) if variant.name == name)
    padded = {"logits_stride": 50_304} | ({"grad_stride": 2 * 50_304} if "gradient" in name else {})
    made = compile_variant(replace(variant, arguments=variant.arguments | padded), "sm_90a")
    assert len(re.findall(r"(?<!p\d )ld\.global\.v4\.b32", made.ptx)) >= 4
    assert made.spilled == 0


def test_the_spill_counter_can_tell():
    """A tile of a megabyte does not fit the registers of four warps."""
    variant = VARIANTS["gradient bf16"]
    huge = replace(variant, constants=variant.constants | {"TILE": 32768})
    assert compile_variant(huge, "sm_90a").spilled > 0


def test_the_report(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["compile_kernels"])
    main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("V = 201,088, K = 100")
    assert re.match(r"launch: [\d,]+ programs, one a row of a strip; statistics \{.ENTRIES", lines[1])
    rows = [line for line in lines if "sm_" in line]
    assert len(rows) == len(VARIANTS) * len(TARGETS)
    assert all(re.search(r"sm_\d+a +\d+ +\d+ +0 +\d+$", row) for row in rows)
