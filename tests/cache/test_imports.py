# SPDX-License-Identifier: Apache-2.0
"""The cache is a library of its own: numpy and small packages, nothing else."""

import re
import subprocess
import sys

BLOCKED = ["torch", "megatron", "transformers", "tokenizers", "gguf", "pandas", "matplotlib"]

PROGRAM = f"""
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED}:
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Blocker())
import numpy as np
from pathlib import Path
from megatron_kd.cache import *
import megatron_kd.cache.commands, megatron_kd.cache.verify, megatron_kd.cache.importers, megatron_kd.cache.copy
from tests.cache.conftest import build, random_documents, write_corpus
folder = Path(sys.argv[1])
corpus = write_corpus(folder / "corpus", random_documents(1, count=5))
build(folder / "cache", corpus, top_k=3)
rows = CacheReader(folder / "cache").read(np.array([[3, 20]]))
check_echo(rows.tokens, corpus.tokens(3, 20), where="here")
print("read", len(rows.tokens))
"""


def test_works_without_torch_megatron_and_transformers(tmp_path):
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.stdout == "read 20\n", done.stderr


def test_nothing_is_unpickled():
    """No module of the cache names a loader that can run code."""
    from pathlib import Path

    import megatron_kd.cache

    for path in Path(megatron_kd.cache.__file__).parent.rglob("*.py"):
        text = re.sub(r"np\.load\([^()]*, allow_pickle=False\)", "", path.read_text())
        assert not any(word in text for word in ("pickle.", "import pickle", "np.load(", "eval(", "exec("))
