# SPDX-License-Identifier: Apache-2.0
"""Real processes over gloo: what each tensor-parallel rank computes, compared with the oracle's truth on that rank."""

import pickle
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_kd.loss import (
    TeacherRows,
    TopK,
    VocabShard,
    dense_divergence,
    forward_chunked_divergence,
    fused_linear_divergence,
    fused_linear_topk,
    vocab_parallel,
)
from tests.loss.checks import relative
from tests.loss.oracle import NAMES, make_case, oracle, poison_masked, ragged

STEPS, BATCH = 12, 2
IMPLEMENTATIONS = {
    "forward": partial(fused_linear_divergence, strip_tokens=16),
    "recompute": partial(fused_linear_divergence, strip_tokens=16, gradient="recompute"),
    "dense": dense_divergence,
    "forward_chunked": partial(forward_chunked_divergence, strip_tokens=16),
}


@dataclass
class Outcome:
    """One call on one rank against the oracle."""

    name: str
    difference: float
    """Largest over the sums and this rank's share of the gradients."""
    factor: float
    """How many times the oracle's gradient the found one is: their dot product over the oracle's square."""
    padding_is_zero: bool
    same_on_all_ranks: bool


@dataclass
class Results:
    """What one rank leaves behind."""

    outcomes: list[Outcome]
    bf16_errors: list[float]
    collectives: dict[str, list[tuple[str, int]]]
    teacher_rows: dict[str, TeacherRows]


def layouts(total, padded, world):
    """Sizes of the shards: even, a third more padding than needed (some shards have no real column), and uneven."""
    wide = -(-total // (world - 1)) if world > 2 else total + 5
    uneven = [3, *[padded // world + 9] * (world - 2)]
    return {
        "even": [padded // world] * world,
        "shard of padding": [wide] * world,
        "uneven": [*uneven, padded - sum(uneven)],
    }


def problems():
    """(case, divergence, CE weight, truth, kind) of every combination: the vocabulary is 507, padded to 512."""
    for temperature in (1.0, 2.0):
        case = make_case(tokens=STEPS * BATCH, total=507, padded=512, k=20, temperature=temperature)
        case.token_weight[: 3 * BATCH] = 0  # all tokens of the first rank of four
        for kind, used in (("full K", poison_masked(case)), ("ragged K", poison_masked(ragged(case)))):
            for name, ce_weight in product(NAMES, (0.0, 0.5)):
                if kind == "full K" or (name == "reverse_kl" and ce_weight):
                    yield used, name, ce_weight, oracle(used, name, ce_weight=ce_weight), kind


def run_worlds(worlds):
    """by_rank of every world size, from one fresh process that forks the ranks: torch is imported once for all."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "combinations").write_bytes(pickle.dumps(list(problems())))
        command = [sys.executable, "-m", "tests.loss.ranks", name, *map(str, worlds)]
        subprocess.run(command, check=True, timeout=800, cwd=Path(__file__).parents[2])
        return {
            world: [pickle.loads((folder / f"{world}-{rank}").read_bytes()) for rank in range(world)]
            for world in worlds
        }


def main(folder, worlds):
    """Fork the ranks of one world size after the other."""
    torch.set_num_threads(1)
    for world in worlds:
        mp.start_processes(rank_main, (world, folder), nprocs=world, start_method="fork")


def rank_main(rank, world, folder):
    """One rank: join the group, compute, leave the results in a file."""
    store = dist.FileStore(str(folder / f"store-{world}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    combinations = pickle.loads((folder / "combinations").read_bytes())
    results = Results(
        compare_all(rank, world, combinations),
        bf16_errors(rank, world),
        collectives(rank, world),
        teacher_rows(rank, world),
    )
    (folder / f"{world}-{rank}").write_bytes(pickle.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def compare_all(rank, world, combinations):
    """Every combination with even shards in both fused modes, with and without sequence parallelism; some others."""
    outcomes = []
    for case, name, ce_weight, truth, kind in combinations:
        for (layout, sizes), implementation, parallel in product(
            layouts(case.total, len(case.weight), world).items(), IMPLEMENTATIONS, (False, True)
        ):
            fused = implementation in ("forward", "recompute")
            rest = ce_weight and name in ("forward_kl", "reverse_kl") and case.temperature == 2
            if (fused and layout == "even") or rest:
                label = f"{name} T={case.temperature} ce={ce_weight} {kind} {layout} {implementation} sp={parallel}"
                found = call(rank, world, case, name, ce_weight, sizes, IMPLEMENTATIONS[implementation], parallel)
                outcomes.append(Outcome(label, *judge(rank, world, case, sizes, truth, parallel, *found)))
    return outcomes


def bf16_errors(rank, world):
    """Relative errors of this rank's bf16 gradients, hidden and weight, in both fused modes, sequence parallel."""
    case = make_case(tokens=STEPS * BATCH, total=507, padded=512, k=20, dtype=torch.bfloat16)
    case.teacher = TopK(case.teacher.ids, *(part.float() for part in case.teacher[1:]))
    truth = oracle(case, "jsd", ce_weight=0.5)
    sizes = [512 // world] * world
    real = min(case.total - rank * sizes[0], sizes[0])
    errors = []
    for mode in ("forward", "recompute"):
        _, grad_hidden, grad_weight = call(rank, world, case, "jsd", 0.5, sizes, IMPLEMENTATIONS[mode], True)
        errors.append(relative(grad_hidden, truth.grad_hidden.chunk(world)[rank]))
        errors.append(relative(grad_weight[:real], truth.grad_weight.split(sizes)[rank][:real]))
    return errors


def collectives(rank, world):
    """Name and size in numbers of every collective, by mode and by whether all tokens are masked; uneven shards."""
    seen = {}
    case = make_case(tokens=STEPS * BATCH, total=507, padded=512, k=20)
    masked = poison_masked(replace(case, token_weight=torch.zeros_like(case.token_weight)))
    sizes = layouts(507, 512, world)["shard of padding"]
    for mode, parallel, (kind, used) in product(
        ("forward", "recompute"), (False, True), (("some", case), ("masked", masked))
    ):
        calls = seen[f"{mode} sp={parallel} {kind}"] = []

        def recorded(name, function, calls=calls):
            return lambda *args, **kwargs: (calls.append((name, args[0].numel())), function(*args, **kwargs))[1]

        with (
            patch.object(dist, "all_reduce", recorded("all_reduce", dist.all_reduce)),
            patch.object(vocab_parallel, "_all_gather", recorded("all_gather", vocab_parallel._all_gather)),
            patch.object(vocab_parallel, "_reduce_scatter", recorded("scatter", vocab_parallel._reduce_scatter)),
        ):
            call(rank, world, used, "forward_kl", 0.5, sizes, IMPLEMENTATIONS[mode], parallel)
    return seen


TEACHER = {"top_k": 20, "temperatures": (2.0,)}


def teacher_case():
    """Logits of few values, so that many tie within and between the shards; labels of which some are absent."""
    random = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randint(-1, 2, (n, 3), generator=random).double() for n in (STEPS * BATCH, 512))
    labels = torch.arange(STEPS * BATCH) * 37 % 507
    return hidden, weight, labels.masked_fill(labels % 5 == 0, -1)


def teacher_rows(rank, world):
    """The teacher's top K by layout of the shards, with and without sequence parallelism; padding is NaN."""
    hidden, weight, labels = teacher_case()
    weight[507:] = torch.nan
    found = {}
    for (name, sizes), parallel in product(layouts(507, 512, world).items(), (False, True)):
        start = sum(sizes[:rank])
        rows = torch.full((sum(sizes), 3), torch.nan, dtype=torch.float64)
        rows[:512] = weight[: sum(sizes)]
        states = hidden.unflatten(0, (STEPS, BATCH))
        found[f"{name} sp={parallel}"] = fused_linear_topk(
            states.chunk(world)[rank] if parallel else states,
            rows[start : start + sizes[rank]],
            shard=VocabShard(start, sizes[rank], 507, dist.group.WORLD),
            sequence_parallel=parallel,
            strip_tokens=16,
            labels=labels.unflatten(0, (STEPS, BATCH)),
            **TEACHER,
        )
    return found


def call(rank, world, case, name, ce_weight, sizes, function, parallel, **options):
    """One call on this rank: the sums, and the gradients of hidden and weight."""
    shard = VocabShard(sum(sizes[:rank]), sizes[rank], case.total, dist.group.WORLD)
    hidden, weight = local_leaves(rank, world, case, sizes, parallel)
    sums = function(
        hidden,
        weight,
        TopK(*(part.unflatten(0, (STEPS, BATCH)) for part in case.teacher)),
        case.token_weight.reshape(STEPS, BATCH),
        labels=case.labels.reshape(STEPS, BATCH),
        divergence=name,
        ce_weight=ce_weight,
        temperature=case.temperature,
        shard=shard,
        sequence_parallel=parallel,
        **options,
    )
    sums.total.backward()
    return sums, hidden.grad.flatten(0, 1), weight.grad


def local_leaves(rank, world, case, sizes, parallel):
    """This rank's hidden states and rows of the weight; all padding is NaN."""
    rows = torch.full((sum(sizes), case.weight.shape[1]), torch.nan, dtype=case.weight.dtype)
    rows[: case.total] = case.weight[: case.total]
    hidden = case.hidden.unflatten(0, (STEPS, BATCH))
    if parallel:
        hidden = hidden.chunk(world)[rank]
    return hidden.clone().requires_grad_(), rows.split(sizes)[rank].clone().requires_grad_()


def judge(rank, world, case, sizes, truth, parallel, sums, grad_hidden, grad_weight):
    """difference, factor, padding_is_zero, same_on_all_ranks."""
    real = max(min(case.total - sum(sizes[:rank]), sizes[rank]), 0)
    true_hidden = truth.grad_hidden.chunk(world)[rank] if parallel else truth.grad_hidden
    true_weight = truth.grad_weight[sum(sizes[:rank]) :][:real]
    found = torch.cat([grad_hidden.flatten(), grad_weight[:real].flatten()])
    true = torch.cat([true_hidden.flatten(), true_weight.flatten()])
    numbers = torch.stack([part.detach().double() for part in sums])
    difference = torch.cat([found - true, numbers - torch.stack([truth.total, truth.kd, truth.ce, truth.weight])])
    everyone = [torch.empty_like(numbers) for _ in range(world)]
    dist.all_gather(everyone, numbers)
    return (
        float(difference.abs().nan_to_num(torch.inf).max()),
        float(found @ true / (true @ true)) if true.any() else 1.0,
        bool((grad_weight[real:] == 0).all()),
        all(torch.equal(numbers, other) for other in everyone),
    )


if __name__ == "__main__":
    from tests.loss import ranks  # its classes are pickled under that name

    ranks.main(Path(sys.argv[1]), [int(world) for world in sys.argv[2:]])
