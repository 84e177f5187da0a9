# SPDX-License-Identifier: Apache-2.0
"""A run's checkpoint as a Hugging Face folder, by Bridge's own export.

Flows in: a checkpoint folder of a run, and the Hugging Face folder that its architecture and tokenizer come from.
Flows out: a folder that ``transformers`` loads, with a model card. Cost: one copy of the weights in host memory.
"""

import json
from pathlib import Path
from typing import Any

import yaml
from megatron.bridge import AutoBridge
from transformers import AutoConfig, AutoTokenizer

from megatron_kd.bridge.iterations import iteration_folder
from megatron_kd.bridge.model_card import model_card
from megatron_kd.bridge.targets import check_checkpoint
from megatron_kd.errors import UserError


def export_hf(checkpoint: Path, reference: Path | str | None, out: Path, *, iteration: int | None = None) -> Path:
    """Write one iteration of ``checkpoint`` as a Hugging Face model, with the reference's tokenizer and a model card.

    Args:
        checkpoint: A run's folder, its folder with ``iter_*`` folders, or one of these; of any parallel layout.
        reference: Hugging Face folder or name of the same architecture: configuration and tokenizer. None: the model
            that the run started from.
        out: Folder to write; made if missing.
        iteration: Which; None for the newest.

    Returns:
        ``out``.

    Raises:
        UserError: If ``checkpoint`` or ``reference`` does not exist, or ``out`` already holds a model.
    """
    saved = iteration_folder(Path(checkpoint), iteration)
    check_checkpoint(saved)
    settings = _saved_settings(saved)
    reference = reference or _start_of(settings)
    if reference is None:
        raise UserError(f"{saved} does not say which Hugging Face model it is built as. Give --reference FOLDER.")
    if str(reference).startswith(("/", ".", "~")) and not (Path(reference) / "config.json").exists():
        raise UserError(
            f"reference: {reference} does not exist or holds no config.json. Give the Hugging Face folder the student "
            "was imported from."
        )
    out = Path(out)
    if any(out.glob("*.safetensors")):
        raise UserError(f"out: {out} already holds a model. Give another folder, or remove it.")
    bridge = _bridge(str(reference), settings)
    bridge.export_ckpt(str(saved), str(out), show_progress=False)
    AutoTokenizer.from_pretrained(str(reference)).save_pretrained(str(out))
    (out / "README.md").write_text(model_card(out.name, str(reference), saved, settings))
    return out


def _saved_settings(saved: Path) -> dict[str, Any]:
    path = saved / "run_config.yaml"
    return yaml.safe_load(path.read_text()) if path.exists() else {}


def _start_of(settings: dict[str, Any]) -> str | None:
    """The Hugging Face model that the run's recipe was built on."""
    return (settings.get("model") or {}).get("hf_model_id")


def _bridge(reference: str, settings: dict[str, Any]) -> AutoBridge:
    """The exporter. It goes by the reference's files, which lack the head of a model that was trained untied from a
    tied one, so that such a model, and the reverse, goes by a configuration that is put right instead.
    """
    try:
        config = AutoConfig.from_pretrained(reference)
    except (OSError, ValueError) as error:
        raise UserError(f"reference: {reference} cannot be read: {error} Give --reference FOLDER.") from error
    tied = (settings.get("model") or {}).get("share_embeddings_and_output_weights")
    if tied is None or bool(tied) == bool(config.get_text_config().tie_word_embeddings):
        return AutoBridge.from_hf_pretrained(reference)
    config.get_text_config().tie_word_embeddings = config.tie_word_embeddings = bool(tied)
    return AutoBridge.from_hf_config(config)


def exported(out: Path) -> str:
    """What was written, in a line."""
    names = json.loads((out / "config.json").read_text()).get("architectures") or ["a model"]
    size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    return f"{out}: {names[0]}, {size / 1e9:.2f} GB, with tokenizer and README.md"
