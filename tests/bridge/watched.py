# SPDX-License-Identifier: Apache-2.0
"""What a run shows of itself, against figures computed by transformers; runs inside CPU ranks."""

from pathlib import Path
from typing import Any

from tests.bridge.loop import distil_config
from tests.dryrun.tiny import VOCABULARY


def by_transformers(hf: Path, corpus: Path, index_cache: Path, *, teacher: Path, top_k: int) -> dict[str, float]:
    """The figures of the first step's four samples, from both models' whole logits."""
    import torch
    from transformers import AutoModelForCausalLM

    from megatron_kd.bridge.dataset import build_datasets

    cfg = distil_config(hf, corpus, index_cache, kd=None, steps=1, tokenizer__vocab_size=VOCABULARY)
    cfg.validate()
    dataset = build_datasets(cfg)[0]
    tokens = torch.stack([dataset[i]["tokens"] for i in range(4)])
    student, master = (AutoModelForCausalLM.from_pretrained(x, attn_implementation="eager") for x in (hf, teacher))
    with torch.no_grad():
        q, p = (model.eval()(tokens).logits.float().log_softmax(-1) for model in (student, master))
    ids = p.topk(top_k).indices
    return {
        "teacher tail": float(1 - p.gather(-1, ids).exp().sum(-1).mean()),
        "student tail": float(1 - q.gather(-1, ids).exp().sum(-1).mean()),
        "top-1 agreement": float((q.argmax(-1) == p.argmax(-1)).float().mean()),
    }


def logged(*inputs: Any, kd: dict[str, Any], folder: Path, **kwargs: Any) -> dict[str, Any]:
    """A run's figures from its TensorBoard events, W&B's offline file, MLflow's store, its history and the console."""
    import contextlib
    import io
    import json
    import os

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from megatron_kd.bridge.history import StepHistory
    from megatron_kd.bridge.train import train

    store = f"sqlite:///{folder}/mlflow.db"
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    os.chdir(folder)  # where MLflow keeps what is no figure
    loggers = {"tensorboard_dir": str(folder / "tensorboard"), "mlflow_experiment": "kd", "mlflow_run_name": "first"}
    loggers |= {"wandb_project": "kd", "wandb_exp_name": "first", "wandb_save_dir": str(folder)}
    loggers |= {"mlflow_tracking_uri": store, "mlflow_log_artifacts": False}
    kwargs |= {f"logger__{name}": value for name, value in loggers.items()}
    cfg = distil_config(*inputs, kd=kd, steps=3, **kwargs)
    with contextlib.redirect_stdout(io.StringIO()) as console:
        train(cfg, callbacks=[StepHistory(folder / "history.jsonl")])
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {
        "events": {name: [event.value for event in events.Scalars(name)] for name in events.Tags()["scalars"]},
        "wandb": wandb_history(folder),
        "mlflow": mlflow_history(store),
        "history": [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()],
        "console": [line for line in console.getvalue().splitlines() if " iteration " in line and "|" in line],
    }


def wandb_history(folder: Path) -> dict[str, list[float]]:
    """Figures by name, step by step, from the file that an offline run of W&B leaves."""
    import json

    import wandb
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    wandb.finish()
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    store, found = DataStore(), {}
    store.open_for_scan(str(file))
    while (data := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        for item in record.history.item:
            found.setdefault(item.key or "/".join(item.nested_key), []).append(json.loads(item.value_json))
    return found


def mlflow_history(store: str) -> dict[str, list[float]]:
    """Figures by name, step by step, from MLflow's database."""
    import mlflow

    client = mlflow.MlflowClient(store)
    (run,) = client.search_runs([client.get_experiment_by_name("kd").experiment_id])
    return {name: [m.value for m in client.get_metric_history(run.info.run_id, name)] for name in run.data.metrics}


def advices(cases: list[tuple[dict[str, float], dict[str, Any]]]) -> list[dict[str, str]]:
    """What the run would warn of in each case of (means, settings)."""
    from megatron_kd.bridge.callbacks import advice
    from megatron_kd.bridge.config import KDConfig

    return [advice(means, KDConfig(**settings)) for means, settings in cases]


def by_class(root: Path) -> dict[str, Any]:
    """Agreement by token frequency as `watch` tells it, and as the two models' logits and the corpus's counts do."""
    import numpy as np
    import torch

    from megatron_kd.bridge.frequency import CLASSES, frequency_classes
    from megatron_kd.bridge.teacher_feed import TeacherBatch
    from megatron_kd.bridge.watch import watch
    from megatron_kd.cache import CacheReader
    from megatron_kd.loss import TopK, VocabShard
    from tests.cache.conftest import build, write_corpus

    random, vocabulary, n = np.random.default_rng(0), 1000, 200
    tokens = np.minimum(vocabulary ** random.random(40_000), vocabulary - 1).astype(np.int64)
    tokens = tokens[tokens % 7 > 0][: 7 * 4096]  # so that every one of them is looked at
    build(root / "cache", write_corpus(root / "corpus", np.array_split(tokens, 20)), top_k=3)
    classes = frequency_classes([CacheReader(root / "cache")], vocabulary)
    generator = torch.Generator().manual_seed(0)
    hidden, weight, noise = (torch.randn(rows, 16, generator=generator) for rows in (n, vocabulary, n))
    teacher = ((hidden + 0.5 * noise) @ weight.T).log_softmax(1)
    logprobs, ids = teacher.topk(3)
    batch = TeacherBatch(TopK(ids[:, None], logprobs[:, None], torch.zeros(n, 1)), torch.ones(n, 1))
    shard = VocabShard(0, vocabulary, vocabulary)
    keep = torch.ones(n, 1, dtype=torch.bool)
    found = watch(
        *(hidden[:, None], weight, batch, keep, shard),
        sequence_parallel=False,
        temperature=1.0,
        tokens=n,
        classes=classes,
    )
    agree, favourite = (hidden @ weight.T).argmax(1) == ids[:, 0], ids[:, 0].numpy()
    share = np.bincount(tokens, minlength=vocabulary)[favourite] / len(tokens)
    own = [share >= 1e-3, (share < 1e-3) & (share >= 1e-4), (share < 1e-4) & (share >= 1e-5), share < 1e-5]
    return {
        "found": [found[f"top-1 agreement, {name}"].tolist() for name in CLASSES],
        "true": [[float((agree.numpy() & mask).sum()), float(mask.sum())] for mask in own],
        "classes": np.bincount(classes.numpy(), minlength=4).tolist(),
    }
