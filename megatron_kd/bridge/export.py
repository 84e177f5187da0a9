# SPDX-License-Identifier: Apache-2.0
"""A run's checkpoint as a Hugging Face folder, by Bridge's own export.

Flows in: a checkpoint folder of a run, and the Hugging Face folder that its architecture and tokenizer come from.
Flows out: a folder that ``transformers`` loads. Cost: one copy of the weights in host memory.
"""

from pathlib import Path

from megatron.bridge import AutoBridge
from transformers import AutoTokenizer

from megatron_kd.bridge.targets import check_checkpoint
from megatron_kd.errors import UserError


def export_hf(checkpoint: Path, reference: Path, out: Path) -> Path:
    """Write the newest iteration of ``checkpoint`` as a Hugging Face model, with the reference's tokenizer.

    Args:
        checkpoint: Folder with ``iter_*`` folders, or one of these, of any parallel layout.
        reference: Hugging Face folder of the same architecture: configuration and tokenizer.
        out: Folder to write; made if missing.

    Returns:
        ``out``.

    Raises:
        UserError: If ``checkpoint`` or ``reference`` does not exist.
    """
    for name, path, remedy in (
        ("checkpoint", checkpoint, "Give the folder that checkpoint.save named"),
        ("reference", reference, "Give the Hugging Face folder the student was imported from"),
    ):
        if not Path(path).exists():
            raise UserError(f"{name}: {path} does not exist. {remedy}.")
    check_checkpoint(checkpoint)
    AutoBridge.from_hf_pretrained(str(reference)).export_ckpt(str(checkpoint), str(out), show_progress=False)
    AutoTokenizer.from_pretrained(str(reference)).save_pretrained(str(out))
    return Path(out)
