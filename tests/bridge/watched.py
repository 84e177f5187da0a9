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
    """A run's figures from its event files, its history, and the console's line of the last step."""
    import contextlib
    import io
    import json

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from megatron_kd.bridge.history import StepHistory
    from megatron_kd.bridge.train import train

    cfg = distil_config(*inputs, kd=kd, steps=3, logger__tensorboard_dir=str(folder / "tensorboard"), **kwargs)
    with contextlib.redirect_stdout(io.StringIO()) as console:
        train(cfg, callbacks=[StepHistory(folder / "history.jsonl")])
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {
        "events": {name: [event.value for event in events.Scalars(name)] for name in events.Tags()["scalars"]},
        "history": [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()],
        "console": [line for line in console.getvalue().splitlines() if " iteration " in line and "|" in line],
    }


def advices(cases: list[tuple[dict[str, float], dict[str, Any]]]) -> list[dict[str, str]]:
    """What the run would warn of in each case of (means, settings)."""
    from megatron_kd.bridge.callbacks import advice
    from megatron_kd.bridge.config import KDConfig

    return [advice(means, KDConfig(**settings)) for means, settings in cases]
