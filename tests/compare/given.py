# SPDX-License-Identifier: Apache-2.0
"""What a comparison on CPU ranks starts from; runs inside a rank."""

from pathlib import Path

from tests.bridge.corpora import build_cache, write_pair_corpus
from tests.bridge.online import write_sharp_teacher
from tests.dryrun.tiny import VOCABULARY, write_tiny_gpt_oss


def make(root: Path) -> None:
    """A student, a teacher with its tokenizer, a corpus, and a cache of the corpus with made-up rows."""
    from megatron_kd.cache import DocumentUnits
    from megatron_kd.teacher.huggingface import load_tokenizer_identity

    write_tiny_gpt_oss(root / "student")
    write_sharp_teacher(root / "teacher")
    units = DocumentUnits(write_pair_corpus(root / "corpus"))
    tokenizer = load_tokenizer_identity(str(root / "student"))
    build_cache(root / "cache", units, tokenizer=tokenizer, vocab_real=VOCABULARY, vocab_padded=VOCABULARY)
