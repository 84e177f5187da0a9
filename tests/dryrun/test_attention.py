# SPDX-License-Identifier: Apache-2.0
"""Core attention of CPU ranks against an fp64 oracle, query by query, and against Megatron's own at CP=1."""

import pytest
import torch

from megatron_kd.dryrun import run_ranks

S, B, N, G, D = 16, 2, 4, 2, 8

CASES = {
    "causal": {},
    "window": dict(window_size=(4, 0)),
    "sink": dict(softmax_type="learnable"),
    "sink and window": dict(softmax_type="learnable", window_size=(3, 0)),
    "off-by-one": dict(softmax_type="off-by-one"),
    "scale": dict(softmax_scale=0.7),
    "full attention in a skipped layer": dict(window_size=(2, 0), window_attn_skip_freq=1),
}


def oracle(query, key, value, sink, *, window: int | None, scale: float) -> torch.Tensor:
    """One query, head and sequence at a time: softmax over the visible keys and the sink, which has value 0."""
    rows = []
    length, batch = query.shape[:2]
    for i in range(length):
        first = 0 if window is None else max(0, i - window)
        for b in range(batch):
            for n in range(N):
                g = n // (N // G)
                scores = key[first : i + 1, b, g] @ query[i, b, n] * scale
                logits = scores if sink is None else torch.cat([scores, sink[n].view(1)])
                weights = (logits - logits.logsumexp(0)).exp()[: len(scores)]
                rows.append(weights @ value[first : i + 1, b, g])
    return torch.stack(rows).view(length, batch, N * D)


def inputs(dtype):
    generator = torch.Generator().manual_seed(5)
    shapes = [(S, B, N, D), (S, B, G, D), (S, B, G, D), (N,), (S, B, N * D)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def zigzag(rank: int, size: int) -> torch.Tensor:
    """Megatron's rule, from its documentation: of 2 * size chunks, rank r holds r and the r-th from the end."""
    chunks = list(torch.arange(S).chunk(2 * size))
    return torch.cat([chunks[rank], chunks[-1 - rank]]) if size > 1 else torch.arange(S)


def build(kind, settings, cp: int):
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    if not parallel_state.model_parallel_is_initialized():
        torch.distributed.init_process_group("gloo")
        parallel_state.initialize_model_parallel(context_parallel_size=cp)
        model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=N * D,
        num_attention_heads=N,
        num_query_groups=G,
        kv_channels=D,
        context_parallel_size=cp,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        **{k: v for k, v in settings.items() if k != "softmax_scale"},
    )
    scale = settings.get("softmax_scale")
    return kind(config, 1, AttnMaskType.causal, "self", softmax_scale=scale)


def attend_and_differentiate(module, dtype, cp: int):
    """Output and gradients of this rank's positions, and of the sink."""
    rank = torch.distributed.get_rank()
    *qkv, sink, weight = inputs(dtype)
    mine = zigzag(rank, cp)
    leaves = [tensor[mine].clone().requires_grad_() for tensor in qkv]
    if isinstance(module.softmax_offset, torch.nn.Parameter):
        module.softmax_offset = torch.nn.Parameter(sink.clone())
        leaves.append(module.softmax_offset)
    elif module.softmax_offset is not None:
        module.softmax_offset = module.softmax_offset.to(dtype)
    output = module(*leaves[:3], None)
    results = [output.detach(), *torch.autograd.grad((output * weight[mine]).sum(), leaves)]
    return [tensor.double().numpy() for tensor in results]


def on_rank(settings, dtype_name: str, cp: int, stock: bool):
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from megatron_kd.dryrun.layers import CpuAttention

    module = build(DotProductAttention if stock else CpuAttention, settings, cp)
    return attend_and_differentiate(module, getattr(torch, dtype_name), cp)


def all_cases(dtype_name: str, cp: int, stock: bool):
    return {name: on_rank(settings, dtype_name, cp, stock) for name, settings in CASES.items()}


def expected(settings) -> list[torch.Tensor]:
    q, k, v, sink, weight = inputs(torch.float64)
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    kind = settings.get("softmax_type", "vanilla")
    offset = {"vanilla": None, "off-by-one": torch.zeros_like(sink), "learnable": sink.clone().requires_grad_()}[kind]
    leaves += [offset] if kind == "learnable" else []
    skipped = settings.get("window_attn_skip_freq") == 1
    window = settings["window_size"][0] if "window_size" in settings and not skipped else None
    output = oracle(*leaves[:3], offset, window=window, scale=settings.get("softmax_scale", D**-0.5))
    return [output.detach(), *torch.autograd.grad((output * weight).sum(), leaves)]


def whole(ranks, cp: int) -> list[torch.Tensor]:
    """Puts the ranks' positions back in order; the sink's gradient is a sum over ranks."""
    order = torch.cat([zigzag(rank, cp) for rank in range(cp)]).argsort()
    results = [[torch.from_numpy(part) for part in parts] for parts in zip(*ranks, strict=True)]
    return [torch.cat(parts)[order] for parts in results[:4]] + [sum(parts) for parts in results[4:]]


def assert_near(ours, right, tolerance, name) -> None:
    torch.testing.assert_close(ours, right, rtol=0, atol=tolerance, msg=lambda text: f"{name}: {text}")


@pytest.mark.parametrize("cp", [1, 2])
def test_values_and_gradients_equal_the_oracle(cp):
    ranks = run_ranks(all_cases, cp, args=("float64", cp, False))
    for name, settings in CASES.items():
        for ours, right in zip(whole([rank[name] for rank in ranks], cp), expected(settings), strict=True):
            assert_near(ours, right, 1e-12, name)


def test_equals_megatrons_own_without_context_parallelism():
    ours, stock = (run_ranks(all_cases, 1, args=("float32", 1, stock))[0] for stock in (False, True))
    for name in CASES:
        for mine, megatrons in zip(ours[name], stock[name], strict=True):
            assert_near(torch.from_numpy(mine), torch.from_numpy(megatrons), 2e-6, name)


def test_bf16_is_rounded_once():
    ranks = run_ranks(all_cases, 2, args=("bfloat16", 2, False))
    q, k, v, sink, _ = (tensor.double() for tensor in inputs(torch.bfloat16))
    exact = oracle(q, k, v, sink, window=None, scale=D**-0.5)
    ours = whole([rank["sink"] for rank in ranks], 2)[0]
    assert ((ours - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()
