# SPDX-License-Identifier: Apache-2.0
"""The bench: what it counts and compares, and that a method that is absent, too large or broken stops no other."""

import contextlib
import io
import json
import statistics

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_kd import bench_commands
from megatron_kd.errors import UserError
from megatron_kd.loss.bench import run_bench
from megatron_kd.loss.bench_methods import BenchShape, full_kl, make_inputs, sparse_kl
from megatron_kd.loss.bench_worker import BenchRequest, GemmLimit, describe, gradient_errors, measure
from megatron_kd.report.loss_bench import HEAD
from tests.loss.checks import relative
from tests.loss.oracle import kl

pytestmark = pytest.mark.slow
N, H, V, K, STRIP = 40, 32, 600, 10, 16
SHAPE = BenchShape(N, H, V, K, "float32", "cpu", STRIP)
OURS = ("fused",)
OTHERS = ("wrong", "absent", "too_large")


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """The command, run once: its JSON, its lines, and the size of its chart."""
    folder = tmp_path_factory.mktemp("bench")
    methods = ",".join([*OURS, *(f"tests.loss.bench_methods:{name}" for name in OTHERS)])
    words = f"--preset cpu --tokens {N} --hidden {H} --vocabulary {V * 2 - 1} --tensor-parallel 2 --top-k {K}"
    words += f" --strip-tokens {STRIP} --repeats 3 --error-tokens 24 --threads 1 --methods {methods}"
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        files = ["--json", str(folder / "b.json"), "--chart", str(folder / "b.png")]
        assert bench_commands.main([*words.split(), *files]) == 0
    found = json.loads((folder / "b.json").read_text())
    entries = {entry["method"].partition(":")[2] or entry["method"]: entry for entry in found["methods"]}
    return found, entries, out.getvalue().splitlines(), (folder / "b.png").read_bytes()


def test_flops_are_those_of_the_products(bench):
    """One in a process of its own, the others in this one, which is faster."""
    _, entries, _, _ = bench
    flops = {name: measure(BenchRequest(name, SHAPE, 1, N))["flops"] for name in ("fused-recompute", "dense")}
    flops["fused"] = entries["fused"]["flops"]
    product = 2 * N * H * V
    assert flops == {"fused": 3 * product, "fused-recompute": 4 * product, "dense": 3 * product}
    assert entries["fused"]["figures"]["gemms"] == 3


def test_errors_tell_right_from_wrong(bench):
    _, entries, _, _ = bench
    for name in OURS:
        assert 0 < entries[name]["figures"]["error"] < 5e-5
    assert entries["wrong"]["figures"]["error"] == pytest.approx(0.01, rel=1e-2)
    assert entries["fused"]["error"]["tokens"] == 24


def test_ratios_follow_from_the_single_times(bench):
    _, entries, _, _ = bench
    for name in (*OURS, "wrong"):
        entry, figures = entries[name], entries[name]["figures"]
        times = [entry[part] for part in ("limit_s", "forward_s", "backward_s")]
        assert all(len(part) == 3 and min(part) > 0 for part in times)
        ratios = [(forward + backward) / limit for limit, forward, backward in zip(*times, strict=True)]
        assert figures["x_limit"] == statistics.median(ratios)
        assert figures["limit_share"] == 1 / figures["x_limit"]
        total = statistics.median(forward + backward for forward, backward in zip(*times[1:], strict=True))
        assert figures["flops_per_s"] == entry["flops"] / total
        assert figures["limit_flops_per_s"] == 3 * 2 * N * H * V / statistics.median(times[0])


def test_what_cannot_be_measured_says_why(bench):
    _, entries, lines, _ = bench
    states = {name: entries[name]["status"] for name in OTHERS}
    assert states == {"wrong": "ok", "absent": "absent", "too_large": "out of memory"}
    text = "\n".join(lines)
    assert "bench_methods:absent: left out, absent: No module named 'a_library_that_is_nowhere'" in text
    assert "tried to allocate" in entries["too_large"]["message"] and entries["too_large"]["message"] in text
    assert "wrong on purpose" in text
    assert describe(ValueError("broken\nbadly")) == ("failed", "ValueError: broken")
    assert describe(torch.OutOfMemoryError("CUDA out of memory")) == ("out of memory", "CUDA out of memory")


def test_the_table_is_that_of_the_json(bench):
    found, entries, lines, chart = bench
    assert lines[0].startswith(f"{N} tokens, hidden {H}, vocabulary {V * 2 - 1:,} / 2 = {V} columns")
    assert f"torch {torch.__version__}" in lines[1] and "1 threads" in lines[1] and "eager" in lines[1]
    start = next(at for at, line in enumerate(lines) if line.startswith("method"))
    rows = {line.split()[0].rpartition(":")[2]: line for line in lines[start + 2 : lines.index("", start)]}
    assert list(rows) == [*OURS, "wrong", "too_large"]  # absent ones have no row
    for name in (*OURS, "wrong"):
        figures = entries[name]["figures"]
        cells = rows[name].split()
        assert f"{figures['x_limit']:.2f}" in cells and f"{figures['gemms']:.2f}" in cells
        assert f"{figures['limit_share']:.0%}" in cells and f"{figures['error']:.1e}" == cells[-1]
    assert "out of memory" in rows["too_large"]
    assert len(HEAD) == 11 and chart.startswith(b"\x89PNG")
    assert found["shape"]["columns"] == V and found["shape"]["strip_tokens"] == STRIP


def test_the_exact_losses_are_forward_kl():
    """Against a sum over single tokens in float64."""
    inputs = make_inputs(SHAPE).double()
    sparse, full = [], []
    for n in range(N):
        ids = inputs.teacher.ids[n]
        logq = (inputs.weight @ inputs.hidden[n]).log_softmax(0)
        rest = torch.ones(V, dtype=torch.bool).scatter(0, ids, False)
        Q = torch.cat([logq[ids], logq[rest].logsumexp(0)[None]])
        P = torch.cat([inputs.teacher.logprobs[n], inputs.teacher.log_tail[n][None]])
        assert float(P.exp().sum()) == pytest.approx(1, abs=1e-5)
        sparse.append(kl(P, Q))
        full.append(kl((inputs.weight @ inputs.teacher_hidden[n]).log_softmax(0), logq))
    for function, values in ((sparse_kl, sparse), (full_kl, full)):
        assert float(function(inputs).detach()) == pytest.approx(float(sum(values).detach()) / N, rel=1e-12)


def test_the_limit_takes_the_three_products():
    inputs = make_inputs(SHAPE)
    limit = GemmLimit(inputs, STRIP)
    with FlopCounterMode(display=False) as counter:
        limit()
    assert counter.get_total_flops() == 3 * 2 * N * H * V
    hidden, weight = inputs.hidden.detach().double(), inputs.weight.detach().double()
    assert relative(limit.grad_hidden, hidden @ weight.T @ weight) < 1e-6
    assert relative(limit.grad_weight, weight @ hidden.T @ hidden) < 1e-6


def test_liger_solves_the_problem_it_is_held_to(monkeypatch):
    """The compiler is left out: it changes no formula."""
    pytest.importorskip("liger_kernel")
    monkeypatch.setattr(torch, "compile", lambda function: function)
    from megatron_kd.bridge.other_losses import liger

    errors = gradient_errors(liger(SHAPE), make_inputs(SHAPE))
    assert max(errors["hidden"], errors["weight"]) < 1e-4


@pytest.mark.parametrize(
    ("shape", "options", "part"),
    [
        (BenchShape(4, 4, 10, 10, "float32", "cpu"), {}, "top_k: expected fewer than the 10 columns"),
        (BenchShape(0, 4, 10, 2, "float32", "cpu"), {}, "tokens: expected at least 1, found 0"),
        (SHAPE, {"methods": ["fusd"]}, "found 'fusd'. Is it 'fused'?"),
        (SHAPE, {"repeats": 0}, "repeats"),
    ],
)
def test_what_cannot_be_asked(shape, options, part):
    with pytest.raises(UserError) as error:
        run_bench(shape, **options)
    assert part in str(error.value)


def test_mistakes_end_with_2(capsys, monkeypatch, tmp_path):
    assert bench_commands.main(["--json", str(tmp_path / "no" / "b.json")]) == 2
    assert "expected an existing folder" in capsys.readouterr().err
    monkeypatch.setattr(bench_commands.importlib.util, "find_spec", lambda name: None)
    assert bench_commands.main(["--chart", "b.png"]) == 2
    assert "matplotlib" in capsys.readouterr().err
