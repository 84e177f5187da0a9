# SPDX-License-Identifier: Apache-2.0
"""Real text that every machine has: Python's own documentation and standard library, or a file of the user's.

In: a text source and a tokenizer. Out: two lists of documents, one array of token ids each; a document is whole on
one side or the other, so nothing of the held-out part was trained on. The choice is a fixed pseudo-random order, the
same on every machine with the same Python. Costs about a second per 100,000 tokens.
"""

import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3", "encodings"}
SKIPPED_PREFIXES = ("_sysconfigdata", "config-")
SMALLEST_FILE = 2_000  # bytes; shorter ones are mostly imports


class Document(NamedTuple):
    """A piece of text and what to call it."""

    name: str
    text: str


class Split(NamedTuple):
    """Documents as token ids: what is trained on, and what is kept aside."""

    train: list[np.ndarray]
    held_out: list[np.ndarray]


class NotEnoughText(ValueError):
    """The text source has fewer tokens than the demo needs."""


def standard_library() -> Iterator[Document]:
    """Every topic of `pydoc` and every module of the standard library, in an order that mixes the two."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = {f"stdlib/{path.relative_to(root).as_posix()}": path for path in root.rglob("*.py") if _wanted(path, root)}
    topics = {f"topic/{name}": text for name, text in _topics().items()}
    for name in sorted([*paths, *topics], key=_shuffled):
        if name in topics:
            yield Document(name, topics[name])
        else:
            yield Document(name, paths[name].read_text(encoding="utf-8", errors="replace"))


def text_file(path: Path, piece_chars: int = 3_000) -> Iterator[Document]:
    """A user's file, cut at blank lines into pieces of about `piece_chars` characters, in a mixed order."""
    pieces, piece = [], ""
    for paragraph in path.read_text(encoding="utf-8", errors="replace").split("\n\n"):
        piece += paragraph + "\n\n"
        if len(piece) >= piece_chars:
            pieces.append(piece)
            piece = ""
    if piece.strip():
        pieces.append(piece)
    documents = [Document(f"{path.name}#{number}", text) for number, text in enumerate(pieces)]
    return iter(sorted(documents, key=lambda document: _shuffled(document.name)))


def split(
    documents: Iterable[Document], tokenizer, *, train_tokens: int, held_out_tokens: int, longest: int, end: int
) -> Split:
    """Tokenise documents until both parts have the tokens asked for; the last document of a part is cut to fit.

    Args:
        documents: the source, read only as far as needed.
        tokenizer: a Hugging Face tokenizer.
        train_tokens: length of the training part.
        held_out_tokens: length of the held-out part, which is filled first.
        longest: tokens of a document after which the rest of it is dropped.
        end: token id put after each document.

    Raises:
        NotEnoughText: the source ran out.
    """
    parts = Split([], [])
    wanted = [(parts.held_out, held_out_tokens), (parts.train, train_tokens)]
    part, missing = wanted.pop(0)
    for document in documents:
        ids = tokenizer(document.text[: longest * 16], add_special_tokens=False)["input_ids"]
        tokens = np.array([*ids[: longest - 1], end], dtype=np.int64)[:missing]
        part.append(tokens)
        missing -= tokens.size
        if not missing:
            if not wanted:
                return parts
            part, missing = wanted.pop(0)
    raise NotEnoughText(
        f"the text ends {missing:,} tokens short of the {train_tokens:,} for training and "
        f"{held_out_tokens:,} held out; give a longer file, or fewer --steps"
    )


def _wanted(path: Path, root: Path) -> bool:
    parts = path.relative_to(root).parts
    if SKIPPED_FOLDERS.intersection(parts) or parts[0].startswith(SKIPPED_PREFIXES) or parts[0] == "pydoc_data":
        return False
    return path.stat().st_size >= SMALLEST_FILE


def _topics() -> dict[str, str]:
    """The language reference that `help()` shows; some distributions package it apart from the library."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return {}
    return topics


def _shuffled(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()
