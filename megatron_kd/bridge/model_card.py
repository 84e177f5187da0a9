# SPDX-License-Identifier: Apache-2.0
"""The model card of an exported student: where it comes from, its teacher, its cache, its settings.

In: the configuration that Bridge saved with a checkpoint, and the cache's manifest if it can still be read. Out: the
text of README.md. Only what was recorded is said. Costs the reading of two small files.
"""

import re
from pathlib import Path
from typing import Any

import megatron_kd
from megatron_kd.bridge.steps import read_steps
from megatron_kd.cache import CacheReader
from megatron_kd.errors import UserError

_KD = (
    "divergence",
    "kd_weight",
    "ce_weight",
    "temperature",
    "top_k",
    "cache_weights",
    "loss",
    "gradient",
    "context",
)
_LAYOUT = {
    "TP": "tensor_model_parallel_size",
    "PP": "pipeline_model_parallel_size",
    "CP": "context_parallel_size",
    "EP": "expert_model_parallel_size",
}

_TEXT = """\
---
library_name: transformers
pipeline_tag: text-generation
{base}tags:
- knowledge-distillation
- megatron-bridge
---
# {name}

{what}

| | |
|---|---|
{rows}

Losses are token-weighted means of one step's batch, not of held-out text. `megatron-kd export` wrote this file from
what the run recorded, and from the cache as it was then; what the model is good for was not measured here
(`megatron-kd evaluate` does that). Licences of the model it started from and of its teacher apply.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/to/{name}")
tokenizer = AutoTokenizer.from_pretrained("path/to/{name}")
```
"""


def model_card(name: str, reference: str, saved: Path, settings: dict[str, Any]) -> str:
    """README.md of the exported folder.

    Args:
        name: the title.
        reference: the Hugging Face model that gave architecture and tokenizer.
        saved: the checkpoint's folder ``iter_*``.
        settings: its ``run_config.yaml``; empty if there is none.
    """
    kd = settings.get("kd") or {}
    rows: dict[str, Any] = {"started from": reference, "checkpoint": saved.name, **_teacher(kd)}
    rows |= {f"kd.{key}": kd[key] for key in _KD if kd.get(key) is not None}
    rows |= _training(settings) | _losses(saved)
    rows["written by"] = f"megatron_kd {megatron_kd.__version__}"
    what = "A student distilled from its teacher" if kd else "A model trained with Megatron's default loss"
    lines = "\n".join(f"| {key} | {_cell(value)} |" for key, value in rows.items() if value is not None)
    return _TEXT.format(base=_base_model(reference), name=name, what=f"{what} in Megatron-Bridge.", rows=lines)


def _base_model(reference: str) -> str:
    """A line of the front matter; the hub takes names of its own there and refuses a card with a folder's path."""
    on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", reference) and not Path(reference).exists()
    return f"base_model: {reference}\n" if on_hub else ""


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def _teacher(kd: dict[str, Any]) -> dict[str, str]:
    if kd.get("teacher"):
        return {"teacher": f"{kd['teacher']}, run beside the student"}
    paths = kd.get("cache") or []
    rows = {}
    for number, path in enumerate([paths] if isinstance(paths, str) else paths, start=1):
        suffix = f" {number}" if number > 1 else ""
        try:
            manifest = CacheReader(path, wait_s=0).manifest
        except (UserError, OSError):
            rows[f"cache{suffix}"] = f"{path}; it could not be read when this card was written"
            continue
        teacher = manifest.teacher
        rows[f"teacher{suffix}"] = ", ".join(
            f"{label}{teacher[key]}"
            for key, label in (("repo", ""), ("revision", "revision "), ("dtype", ""), ("engine", "by "))
            if teacher.get(key)
        )
        rows[f"weights of the teacher{suffix}"] = teacher.get("weights")
        rows[f"cache{suffix}"] = (
            f"{path}: top {manifest.top_k} of {manifest.vocab_real:,} ids and the mass of the rest, "
            f"{manifest.rows:,} tokens, {manifest.values}, digest {manifest.digest()}"
        )
    return rows


def _training(settings: dict[str, Any]) -> dict[str, Any]:
    model, train = settings.get("model") or {}, settings.get("train") or {}
    dataset, optimizer = settings.get("dataset") or {}, settings.get("optimizer") or {}
    wanted = {
        "corpus": dataset.get("data_path") or dataset.get("blend"),
        "sequence length": dataset.get("seq_length") or model.get("seq_length"),
        "samples a step": train.get("global_batch_size"),
        "steps planned": train.get("train_iters"),
        "learning rate": optimizer.get("lr"),
        "seed": (settings.get("rng") or {}).get("seed"),
        "tied head": model.get("share_embeddings_and_output_weights"),
        "layout": " ".join(f"{name}={model[key]}" for name, key in _LAYOUT.items() if key in model),
    }
    return {key: value for key, value in wanted.items() if value not in (None, "")}


def _losses(saved: Path) -> dict[str, str]:
    """Of the checkpoint's step, if the run kept its curve."""
    step = int(saved.name.removeprefix("iter_") or 0)
    return {
        f"{name} at step {step}": f"{line[name]:.4f}"
        for line in read_steps(saved.parent.parent / "history.jsonl")
        if line["step"] == step
        for name in ("kd loss", "lm loss", "total loss")
        if name in line
    }
