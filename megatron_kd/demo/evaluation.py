# SPDX-License-Identifier: Apache-2.0
"""Students against their teacher on held-out text, whole documents at a time.

In: Hugging Face folders and documents. Out: `Fidelity` per student and one for the teacher itself. All models are in
memory at once (about 0.5 GB each here) and see each document once; their logits exist for `STRIP` positions at a time.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_kd.report.fidelity import NO_LABEL, Fidelity

STRIP = 128
TEACHER = "teacher"


def evaluate(teacher: Path, students: dict[str, Path], documents: Sequence[np.ndarray]) -> dict[str, Fidelity]:
    """Compare each student with the teacher on every position of the documents.

    Args:
        teacher: Hugging Face folder.
        students: name -> Hugging Face folder, same vocabulary.
        documents: token ids of each.

    Returns:
        Name -> figures; under "teacher" those of the teacher against itself, which give its perplexity.
    """
    import torch
    from tqdm import tqdm
    from transformers import AutoModelForCausalLM

    folders = {TEACHER: teacher, **students}
    models = {name: AutoModelForCausalLM.from_pretrained(folder) for name, folder in folders.items()}
    result = {name: Fidelity() for name in models}
    with tqdm(total=sum(map(len, documents)), desc="      held-out tokens", unit="tok") as bar:
        for document in documents:
            tokens = torch.from_numpy(document.astype(np.int64))
            with torch.inference_mode():
                hidden = {name: _hidden_states(model, tokens) for name, model in models.items()}
                labels = torch.cat([tokens[1:], tokens.new_full((1,), NO_LABEL)])
                for rows in torch.arange(len(tokens)).split(STRIP):
                    target = models[TEACHER].lm_head(hidden[TEACHER][rows])
                    for name, model in models.items():
                        result[name].add(model.lm_head(hidden[name][rows]), target, labels[rows])
            bar.update(len(document))
    return result


def _hidden_states(model: Any, tokens: Any) -> Any:
    return model.model(tokens[None], use_cache=False).last_hidden_state[0]
