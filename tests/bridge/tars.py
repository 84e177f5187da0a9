# SPDX-License-Identifier: Apache-2.0
"""Cached-logits tars written by Megatron-LM's own saver for the samples of a run; all runs inside a CPU rank."""

import io
import pickle
import shutil
import tarfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from tests.bridge.corpora import VOCABULARY, write_pair_corpus
from tests.bridge.spans import built

SEQUENCE, GLOBAL, MICRO, DP, CP, ITERATIONS, K = 64, 8, 2, 2, 2, 2, 20


def sample_logits(dataset: Any, index: int) -> Any:
    """Logits [S, 512] that expect the right token; the padded column never wins."""
    import torch

    labels = dataset[index]["labels"]
    logits = torch.randn(SEQUENCE, 512, generator=torch.Generator().manual_seed(index)) * 2
    logits[torch.arange(SEQUENCE), labels] += 6
    logits[:, VOCABULARY:] = -1e4
    return logits


def write_tars(dataset: Any, folder: Path, *, p: float | None = None, dtype: str = "fp16") -> None:
    """What the saver's ranks write in two iterations of DP=2, CP=2, two micro-batches of two samples."""
    import torch
    from megatron.bridge.data.samplers import MegatronPretrainingSampler
    from megatron.training.distillation import logits_saver
    from megatron.training.distillation.utils_logits import batched_tar_filename

    meta = b'{"hash":"abc","identifiers":{"seed":1},"saver":{"k":20,"save_dtype":"%s"}}' % dtype.encode()
    for dp in range(DP):
        sampler = MegatronPretrainingSampler(GLOBAL * ITERATIONS, 0, MICRO, dp, DP)
        batches = list(sampler)
        for cp in range(CP):
            saver = object.__new__(logits_saver.LogitsSaverHooks)
            saver.tp_rank, saver.tp_size, saver.k, saver.p, saver.min_k = 0, 1, K, p, 1
            saver._save_dtype = saver._DTYPE_MAP[dtype]
            saver._topp_kept_counts, saver._pending_writes = [], OrderedDict()
            for iteration in range(ITERATIONS):
                results = []
                for batch in batches[iteration * 2 : iteration * 2 + 2]:
                    logits = torch.stack([sample_logits(dataset, i) for i in batch], dim=1)
                    chunks = logits.chunk(2 * CP)
                    results.append(saver._process_single_microbatch(torch.cat([chunks[cp], chunks[2 * CP - 1 - cp]])))
                logits_saver.get_current_iteration = lambda iteration=iteration: iteration
                saver._buffer_iteration(*map(list, zip(*results, strict=True)))
            path = folder / batched_tar_filename(cp, dp, ITERATIONS - 1)
            saver._write_batched_tar(str(path), saver._pending_writes, meta)


def check_tars(hf: Path, root: Path) -> dict[str, int]:
    """Rows of the imported cache against the logits, through the feed of a run; top-p and all value types."""
    import torch

    from megatron_kd.bridge.dataset import SampleUnits
    from megatron_kd.bridge.teacher_feed import CacheFeed
    from megatron_kd.cache import CacheReader
    from megatron_kd.cache.importers import MegatronTars, import_cache

    write_pair_corpus(root / "corpus")
    keyed = built(hf, [root / "corpus"], root / "index", samples=GLOBAL * ITERATIONS, seq_length=SEQUENCE)
    dataset = torch.utils.data.Subset(keyed.dataset, range(GLOBAL * ITERATIONS))
    units = SampleUnits(keyed.dataset)
    units.lengths = units.lengths[: GLOBAL * ITERATIONS]
    counts = {"rows": 0, "dropped": 0}
    for name, p, dtype, tolerance in (("k", None, "fp16", 8e-3), ("p", 0.9, "fp32", 8e-3), ("b", None, "bf16", 0.1)):
        write_tars(dataset, root / f"tars-{name}", p=p, dtype=dtype)
        source = MegatronTars(root / f"tars-{name}", units)
        import_cache(source, units, root / f"cache-{name}", teacher={"repo": "x"}, vocab_real=VOCABULARY, top_k=K,
                     accept_derived_tail=True, tile_tokens=200, partial=False)  # fmt: skip
        feed = CacheFeed([CacheReader(root / f"cache-{name}")], top_k=None, temperature=1.0, tokenizer=None,
                         read_ahead=0)  # fmt: skip
        feed.bind([keyed, None, None])
        for index in range(len(units.lengths)):
            batch = {k: v[None] for k, v in keyed[index].items() if torch.is_tensor(v)}
            rows = feed.take(batch).teacher
            every = sample_logits(keyed.dataset, index).log_softmax(-1)
            there = rows.logprobs[:, 0].isfinite()
            counts["rows"] += int(there[:, 0].sum())
            counts["dropped"] += int((~there).sum())
            true = every.gather(-1, rows.ids[:, 0].long())
            assert (rows.logprobs[:, 0] - true)[there].abs().max() < tolerance, (name, index)
            assert (every.max(-1).values - true[:, 0]).max() < tolerance, (name, index)
            if p is None:
                assert torch.equal(rows.ids[:, 0].sort(-1).values, every.topk(K).indices.sort(-1).values.int())
            mass = rows.logprobs[:, 0].exp().sum(-1) + rows.log_tail[:, 0].exp()
            torch.testing.assert_close(mass, torch.ones_like(mass), atol=2e-3, rtol=0)
    return counts


def check_indexed_samples(hf: Path, root: Path) -> int:
    """Samples from the index files against those of the dataset: a corpus with and without extra token, and a blend.

    Then the command, on tars of Megatron's own saver, against the import with the dataset.
    """
    from megatron_kd.bridge.dataset import SampleUnits
    from megatron_kd.cache import CacheReader
    from megatron_kd.cache.importers import IndexedSamples, MegatronTars, import_cache
    from tests.cache.test_commands import run

    write_pair_corpus(root / "corpus")
    write_pair_corpus(root / "other", seed=1)
    checked = 0
    for number, (blend, extra) in enumerate(((["corpus"], True), (["corpus"], False), (["corpus", "other"], True))):
        index, samples = root / f"index-{number}", GLOBAL * ITERATIONS
        parts = [root / name for name in blend]
        parts = parts if len(parts) == 1 else ["30", parts[0], "70", parts[1]]
        keyed = built(hf, parts, index, samples=samples, seq_length=SEQUENCE, extra_token=extra)
        kind = "GPT" if len(blend) == 1 else "Blended"
        (files,) = index.glob(f"*-{kind}Dataset-train-description.txt")
        units, true = IndexedSamples(files, extra_token=extra), SampleUnits(keyed.dataset)
        assert units.identity() == true.identity() and np.array_equal(units.lengths, true.lengths)
        for unit in range(len(true.lengths)):
            assert np.array_equal(units.tokens(unit), true.tokens(unit)), (blend, extra, unit)
            checked += 1
        if number == 0:
            write_tars(keyed.dataset, root / "tars")
            words = ["import", root / "tars", "--format", "megatron-tar", "--samples", files]
            words += ["--vocab-size", VOCABULARY]
            words += ["--teacher", "x", "--limit", samples, "--tile-tokens", 200, "--accept-derived-tail"]
            assert run(*words, "--no-progress", "--out", root / "by-command") == 0
            true.lengths = true.lengths[:samples]
            import_cache(MegatronTars(root / "tars", true), true, root / "by-python", teacher={"repo": "x"},
                         vocab_real=VOCABULARY, tile_tokens=200, accept_derived_tail=True)  # fmt: skip
            rows = [
                CacheReader(root / name).read(np.array([[0, samples * SEQUENCE]]))
                for name in ("by-command", "by-python")
            ]
            assert all(np.array_equal(*planes) for planes in zip(*rows, strict=True))
    return checked


def check_refused_tars(hf: Path, root: Path) -> list[str]:
    """Messages for tars that are incomplete, of other samples, or traps."""
    import torch
    import zstandard

    from megatron_kd.bridge.dataset import SampleUnits
    from megatron_kd.cache import ImportRefused
    from megatron_kd.cache.importers import MegatronTars
    from megatron_kd.cache.importers.torch_file import read_tensors

    write_pair_corpus(root / "corpus")
    samples = GLOBAL * ITERATIONS
    keyed = built(hf, [root / "corpus"], root / "index", samples=samples, seq_length=SEQUENCE)
    other = built(hf, [root / "corpus"], root / "index", samples=samples, seq_length=SEQUENCE, seed=7)
    units, others = SampleUnits(keyed.dataset), SampleUnits(other.dataset)
    write_tars(keyed.dataset, root / "tars")
    messages = []

    def refused(folder: Path, with_units: SampleUnits = units) -> None:
        try:
            list(MegatronTars(folder, with_units))
            messages.append("accepted")
        except ImportRefused as error:
            messages.append(str(error))

    def rewritten(name: str, change: Any) -> Path:
        """The tars with the members of one of them changed."""
        folder = Path(shutil.copytree(root / "tars", root / name))
        tar = folder / "cp1_dp1__1.tar"
        with tarfile.open(root / "tars" / tar.name) as old, tarfile.open(tar, "w") as new:
            for member in old:
                data = change(member, old.extractfile(member).read())
                if data is not None:
                    member.size = len(data)
                    new.addfile(member, io.BytesIO(data))
        return folder

    class Trap:
        def __reduce__(self):
            return (Path.touch, (root / "sprung",))

    trap = io.BytesIO()
    torch.save({"values": [Trap()], "indices_low": [], "bit_17": []}, trap)
    for data in (trap.getvalue(), pickle.dumps(Trap()), b""):
        try:
            read_tensors(data, "the trap")
        except ImportRefused as error:
            messages.append(str(error))
    bomb = zstandard.ZstdCompressor().compress(trap.getvalue())
    bomb = bomb[:4] + b"\xe0" + (1 << 40).to_bytes(8, "little") + bomb[6:]
    refused(rewritten("missing-iteration", lambda m, d: None if m.name.startswith("0.") else d))
    refused(rewritten("other-run", lambda m, d: d.replace(b"abc", b"abd") if m.name == "_meta.json" else d))
    refused(rewritten("no-meta", lambda m, d: None if m.name == "_meta.json" else d))
    refused(rewritten("trap", lambda m, d: zstandard.compress(trap.getvalue()) if m.name == "0.pt.zst" else d))
    refused(rewritten("bomb", lambda m, d: bomb if m.name == "0.pt.zst" else d))
    refused(rewritten("cut", lambda m, d: d[:-20] if m.name == "0.pt.zst" else d))
    refused(root / "tars", others)
    refused(root / "nothing")
    assert not (root / "sprung").exists()
    rng = np.random.default_rng(0)
    sound = io.BytesIO()
    torch.save({"values": [torch.randn(4, 2, 3).bfloat16()], "x": [torch.zeros(3, dtype=torch.uint16)]}, sound)
    for _ in range(400):  # whatever is changed, only our own error comes out
        data = bytearray(sound.getvalue())
        for at in rng.integers(0, len(data), 3):
            data[at] = rng.integers(256)
        try:
            read_tensors(bytes(data), "noise")
        except ImportRefused:
            messages.append("noise")
    return messages
