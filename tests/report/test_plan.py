# SPDX-License-Identifier: Apache-2.0
"""The planner's arithmetic against counts on meta tensors, published sizes, the cache's own layout, and itself."""

import csv
import io
import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

from megatron_kd.cli import main
from megatron_kd.loss import (
    TopK,
    VocabShard,
    dense_divergence,
    forward_chunked_divergence,
    fused_linear_divergence,
    vocab_parallel,
)
from megatron_kd.loss.arguments import STRIP_BYTES, default_strip_tokens
from megatron_kd.report import plan_memory
from megatron_kd.report.memory import LiveBytes
from megatron_kd.report.plan import changes, csv_rows, fits, make_plan, plan_text, room, smallest_nodes
from megatron_kd.report.plan_memory import LOSSES, by_loss, loss_bytes, rank_memory, stage_memory, total_parameters
from megatron_kd.report.plan_published import (
    GPT_OSS_20B,
    GPT_OSS_120B,
    LLAMA_3B,
    LLAMA_8B,
    published_points,
    published_table,
)
from megatron_kd.report.plan_shape import MACHINES, Layout, Loss, Run, Training
from megatron_kd.report.plan_time import row_bytes, step_seconds, token_flops

H200 = MACHINES["h200"]
TRAINING = Training(seq_length=32768, micro_batch=1, global_batch=64, steps=10)


def gpt_oss(**layout) -> Run:
    sizes = {"gpus": 8, "tensor": 4, "expert": 8, "sequence_parallel": True} | layout
    return Run(model=GPT_OSS_20B, layout=Layout(**sizes), training=TRAINING)


def test_whole_models_have_the_published_size():
    sizes = {GPT_OSS_20B: 20_914_757_184, GPT_OSS_120B: 116_829_156_672, LLAMA_8B: 8_030_261_248}
    assert {model: total_parameters(model) for model in sizes} == sizes
    assert total_parameters(LLAMA_3B) == 3_212_749_824


# ---- the loss: formulas against the bytes of its tensors ----

FUNCTIONS = {
    "dense": (dense_divergence, {}),
    "forward_chunked": (forward_chunked_divergence, {}),
    "fused": (fused_linear_divergence, {}),
    "fused, recompute": (fused_linear_divergence, {"gradient": "recompute"}),
}
TOLERANCE = {"dense": 1e-6, "forward_chunked": 1e-3, "fused": 0.03, "fused, recompute": 0.03}
"""Of the whole; the fused loss's small tensors depend on where in a strip its peak lies."""


def counted(name: str, run: Run, monkeypatch) -> int:
    """The loss on meta tensors as a training step calls it, beyond head, main_grad and hidden states."""
    function, options = FUNCTIONS[name]
    ranks, tokens, hidden_size, K = run.layout.tensor, run.tokens, run.model.hidden, run.loss.top_k
    done = lambda *_, async_op=False, **__: SimpleNamespace(wait=lambda: None)  # noqa: E731
    for collective in ("_all_gather", "_reduce_scatter"):
        monkeypatch.setattr(vocab_parallel, collective, done)
    monkeypatch.setattr(
        vocab_parallel.dist, "all_reduce", lambda *_, async_op=False, **__: SimpleNamespace(wait=lambda: None)
    )
    monkeypatch.setattr(vocab_parallel.dist, "get_world_size", lambda group: ranks)
    monkeypatch.setattr(vocab_parallel.dist, "get_rank", lambda group: 0)
    make = lambda *shape, **kinds: torch.empty(*shape, **kinds, device="meta")  # noqa: E731
    columns = run.model.vocabulary // ranks
    hidden = make(tokens // ranks, hidden_size, dtype=torch.bfloat16, requires_grad=True)
    weight = make(columns, hidden_size, dtype=torch.bfloat16, requires_grad=True)
    weight.main_grad, weight.grad_added_to_main_grad = make(columns, hidden_size), False
    given = [hidden, weight, weight.main_grad]
    teacher = TopK(make(tokens, K, dtype=torch.int32), make(tokens, K), make(tokens))
    token_weight = make(tokens)
    if ranks > 1:
        shard = VocabShard(0, columns, run.model.vocabulary, object())
        options = {**options, "shard": shard, "sequence_parallel": True}
    labels, keep = make(tokens, dtype=torch.int64), torch.ones(tokens, dtype=torch.bool)
    with LiveBytes(*given, *teacher, token_weight) as counter:
        total = function(hidden, weight, teacher, token_weight, labels=labels, keep=keep, **options).total
        total.backward()
    return counter.peak - sum(tensor.nbytes for tensor in given)


SHAPES = {
    "GPT-OSS head, 16K": (GPT_OSS_20B, 16384, 1, 100),
    "Llama head, 8K": (LLAMA_3B, 8192, 1, 100),
    "GPT-OSS head on four ranks, K = 20": (GPT_OSS_20B, 32768, 4, 20),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_loss_takes_what_its_tensors_do(shape, name, monkeypatch):
    model, tokens, ranks, top_k = SHAPES[shape]
    run = Run(
        model=model,
        layout=Layout(gpus=ranks, tensor=ranks, sequence_parallel=ranks > 1),
        training=replace(TRAINING, seq_length=tokens),
        loss=Loss(top_k=top_k),
    )
    expected = counted(name, run, monkeypatch)
    found = loss_bytes(run, replace(LOSSES[name], top_k=top_k))
    assert found == pytest.approx(expected, rel=TOLERANCE[name]), f"{found / expected - 1:+.2%}"


def test_strips_are_those_of_the_loss():
    assert plan_memory.STRIP_BYTES == STRIP_BYTES
    for columns in (201_088, 50_272, 128_256, 25_136, 900):
        shard = VocabShard(0, columns, columns)
        assert plan_memory.default_strip(columns) == default_strip_tokens(shard, torch.float32)


@pytest.mark.parametrize(
    ("vocabulary", "top_k", "stored"),
    [
        (201_088, 100, 4 + 4 + 200 + 200 + 25),  # tail, token, values, ids, and 2 more bits an id
        (50_000, 20, 4 + 4 + 40 + 40 + 5),
        (600_000, 7, 4 + 4 + 14 + 14 + 4),  # 4 more bits an id
    ],
)
def test_a_token_takes_what_the_format_says(vocabulary, top_k, stored):
    assert row_bytes(vocabulary, top_k) == stored + 8 / 512


# ---- FLOPs ----


def test_flops_of_attention_are_those_of_the_pairs_it_sees():
    """Every (query, key) pair within the window counted one by one; but for half a diagonal."""
    length = 512
    for window in (None, 128, 600):
        pairs = sum(min(at + 1, window or length) for at in range(length))
        model = replace(LLAMA_3B, windows=(window,), moe=(False,))
        width = model.heads * model.head_size
        assert token_flops(model, length)["attention"] * length == pytest.approx(4 * width * pairs, rel=0.005)


def test_fused_needs_three_products_and_recompute_four():
    parts = {name: step_seconds(gpt_oss(), H200, name) for name in LOSSES}
    assert all(parts[name]["products"] == parts["fused"]["products"] for name in LOSSES)
    assert parts["fused"]["loss"] < parts["fused, recompute"]["loss"] < 1.4 * parts["fused"]["loss"]
    assert parts["fused"]["loss"] < parts["forward_chunked"]["loss"] < parts["dense"]["loss"]


# ---- stages, layouts, what they change ----


def test_stages_hold_the_whole_model_once():
    for pipeline, tensor, virtual in ((4, 2, 1), (2, 1, 3), (6, 8, 2)):
        layout = Layout(gpus=64, pipeline=pipeline, tensor=tensor, virtual=virtual)
        layers = [plan_memory.layer_indices(GPT_OSS_20B, layout, stage) for stage in range(pipeline)]
        assert sorted(sum(layers, [])) == list(range(24))
        if tensor == 1:
            parts = [sum(plan_memory.rank_parameters(GPT_OSS_20B, layout, stage)) for stage in range(pipeline)]
            assert sum(parts) == total_parameters(GPT_OSS_20B)


def test_what_parallelism_divides():
    one, tensor, context = gpt_oss(tensor=1, sequence_parallel=False), gpt_oss(tensor=2), gpt_oss(tensor=1, context=2)
    whole = stage_memory(one, 0)
    assert stage_memory(tensor, 0)["activations"] == pytest.approx(whole["activations"] / 2)
    assert stage_memory(context, 0)["activations"] == pytest.approx(whole["activations"] / 2)
    assert stage_memory(context, 0)["weights"] == whole["weights"] > stage_memory(tensor, 0)["weights"]
    more = stage_memory(gpt_oss(gpus=32), 0)
    assert more["optimizer"] == pytest.approx(stage_memory(gpt_oss(), 0)["optimizer"] / 4)
    staged = replace(gpt_oss(gpus=32, pipeline=4), training=replace(TRAINING, global_batch=128))
    head = 2 * 2 * 32768 / 4 * 2880  # the final norm's input, and the head's
    assert stage_memory(staged, 0)["activations"] == pytest.approx(stage_memory(gpt_oss(), 0)["activations"] - head)
    assert stage_memory(staged, 3)["loss"] > 0 == stage_memory(staged, 0)["loss"]
    interleaved = replace(staged, layout=replace(staged.layout, virtual=3))
    ratio = stage_memory(interleaved, 0)["activations"] / stage_memory(staged, 0)["activations"]
    assert ratio == pytest.approx(1 + 3 / (4 * 3))


def test_recomputation_keeps_inputs_and_one_layer():
    run = gpt_oss()
    full = replace(run, training=replace(TRAINING, recompute="full"))
    inputs = 2 * 32768 / 4 * 2880
    head = 2 * inputs
    layer = (rank_memory(run)["activations"] - head) / 24
    assert rank_memory(full)["activations"] == pytest.approx(24 * inputs + layer + head)
    some = replace(full, training=replace(full.training, recompute_method="block", recompute_layers=4))
    assert rank_memory(some)["activations"] == pytest.approx(4 * inputs + 21 * layer + head)


def test_verdict_nodes_and_changes_agree():
    """Where a plan says that it fits, the sum fits; the fewest nodes fit and one node less does not."""
    big = Run(model=GPT_OSS_120B, layout=Layout(gpus=8, tensor=4, expert=8, sequence_parallel=True), training=TRAINING)
    assert not fits(big, H200)
    proposed = changes(big, H200)
    assert proposed and all(one["bytes"] < sum(rank_memory(big).values()) for one in proposed)
    staged = replace(big, layout=replace(big.layout, pipeline=4, gpus=32))
    nodes = smallest_nodes(staged, H200)
    assert nodes == 4 and fits(replace(staged, layout=replace(staged.layout, gpus=32)), H200)
    wide = gpt_oss(tensor=1, sequence_parallel=False, context=4)
    nodes = smallest_nodes(wide, H200)
    assert fits(replace(wide, layout=replace(wide.layout, gpus=8 * nodes)), H200)
    small = replace(H200, memory=sum(rank_memory(gpt_oss(gpus=16)).values()) / 0.9)
    assert smallest_nodes(gpt_oss(), small) == 2 and not fits(gpt_oss(), small)


def test_a_plan_is_plain_values_and_its_tables_can_be_recomputed():
    run = gpt_oss()
    plan = json.loads(json.dumps(make_plan(run, H200)))
    assert Run.from_dict(plan["run"]) == run == Run.from_dict(asdict(run))
    assert plan["memory"] == by_loss(run) and plan["fits"] is fits(run, H200) and plan["room"] == room(H200)
    file = io.StringIO()
    csv.writer(file).writerows(csv_rows(plan))
    rows = list(csv.DictReader(io.StringIO(file.getvalue())))
    assert {row["kind"] for row in rows} == {"modelled"}
    for name, parts in plan["memory"].items():
        totals = [int(row["value"]) for row in rows if row["loss"] == name and row["figure"] == "memory: total"]
        assert totals == [round(sum(parts.values()))]
        step = plan["step"][name]
        assert sum(step["parts"].values()) == pytest.approx(step["seconds"])
        per_gpu = plan["step_flops"] / step["seconds"] / 8
        assert step["tflops_per_gpu"] == pytest.approx(per_gpu / 1e12) and step["mfu"] == pytest.approx(
            per_gpu / 989e12
        )
    text = plan_text(plan)
    assert "FITS (modelled): 80.8 GB" in text and "fused *" in text
    assert text.count("modelled") >= 6


# ---- the published points ----

NEAR = {  # how far our model is from what was published; the reasons are in the table
    "one teacher tensor in bf16": (0.0, 0.06),
    "peak, online, dense": (0.0, 0.10),
    "peak, offline, fused": (0.0, 0.10),
    "Loss alone, 32K: fused": (-0.25, 0.0),
    "Loss alone, 256K: fused": (-0.45, 0.0),
    "nodes, fused": (0, 0),
    "32K: step, one node": (-0.25, 0.0),
    "work of a step": (-0.05, 0.05),
    "rate, one node": (0.0, 0.25),
}


@pytest.mark.parametrize("part", NEAR)
def test_published_points_that_the_model_meets(part):
    (point,) = [point for point in published_points() if part in point.what]
    low, high = NEAR[part]
    assert low <= point.deviation <= high, point


def test_every_published_point_says_why():
    points, table = published_points(), published_table()
    assert len(points) == 15 and all(point.why and point.published > 0 for point in points)
    for figure in (
        "250 GB",
        "128 GB",
        "102.8 GB",
        "58.3 GB",
        "85.2 GiB",
        "5.45 GiB",
        "134.2 GiB",
        "11.6 GiB",
        "12.23",
    ):
        assert figure in table
    (point,) = [point for point in points if point.what == "Loss alone, 32K: dense"]
    assert point.modelled * (1 << 30) == pytest.approx(29 * 32768 * 201088, rel=0.03)


def test_the_command_without_megatron(capsys):
    """The published points need no recipe; a wrong figure is refused before one is read."""
    assert main(["plan", "--published"]) == 0
    assert capsys.readouterr().out == published_table() + "\n"
    assert main(["plan", "--recipe", "m:x", "--memory", "0"]) == 2
    assert "--memory 0.0: expected GB above 0" in capsys.readouterr().err


# ---- a teacher beside the student ----


def test_a_teacher_beside_the_student_takes_its_weights_and_one_forward():
    run = replace(gpt_oss(tensor=1, expert=1, sequence_parallel=False), teacher=LLAMA_8B)
    online = replace(run, loss=replace(run.loss, online=True))
    more = {part: size - rank_memory(run).get(part, 0) for part, size in rank_memory(online).items()}
    assert more.pop("teacher") == 2 * 8_030_261_248 and not any(more.values())
    instant = replace(H200, bandwidth=float("inf"), nvlink=float("inf"), network=float("inf"))
    apart, beside = (step_seconds(one, instant, "fused") for one in (run, online))
    flops = token_flops(LLAMA_8B, run.training.seq_length)
    shares = {"products": 0.75, "attention": 0.6, "experts": 0.55, "head": 0.75}
    forward = sum(flops[kind] / (H200.flops * share) for kind, share in shares.items())
    assert beside.pop("teacher") == pytest.approx(forward * run.tokens_per_step / run.layout.data)
    assert beside == apart


def test_where_the_teacher_needs_more_than_the_student_it_says_so():
    """A student of one narrow layer: the teacher's own forward is the peak, by its widest layer and a strip."""
    student = replace(LLAMA_3B, hidden=64, heads=4, groups=4, head_size=16, ffn=64, windows=(None,), vocabulary=512,
                      padded_vocabulary=512)  # fmt: skip
    training = replace(TRAINING, seq_length=4096)
    run = Run(model=student, layout=Layout(gpus=1), training=training, loss=Loss(online=True), teacher=LLAMA_8B)
    parts = rank_memory(run)
    extra = parts["teacher"] - 2 * 8_030_261_248
    layer = 2 * 4096 * (4 * 4096 + 2 * (32 + 8) * 128 + 3 * 14336)
    strip = 4 * plan_memory.default_strip(128_256) * 128_256
    assert extra == pytest.approx(layer + 4 * 4096 * 4096 + strip - parts["activations"] - parts["loss"])


def test_what_to_change_about_a_teacher_beside_the_student_is_a_cache():
    run = replace(gpt_oss(), teacher=GPT_OSS_120B, loss=Loss(online=True))
    texts = [one["change"] for one in changes(run, H200)]
    assert any("kd.cache" in text for text in texts) and not any("pipeline" in text for text in texts)
    plan = make_plan(run, H200)
    assert "teacher" in plan_text(plan) and "Cache instead" in plan_text(plan)
    anywhere = plan["smallest_at_any_layout"]
    assert anywhere is None or anywhere["layout"]["pipeline"] == 1
