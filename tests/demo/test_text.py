# SPDX-License-Identifier: Apache-2.0
"""The demo's corpus: real, split by whole documents, the same every time."""

from pathlib import Path

import pytest

from megatron_kd.demo.text import Document, NotEnoughText, split, standard_library, text_file


class Letters:
    """A tokenizer with one id a character."""

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [ord(letter) for letter in text]}


def documents(*texts: str) -> list[Document]:
    return [Document(str(number), text) for number, text in enumerate(texts)]


def cut(*texts: str, train: int, held_out: int, longest: int = 100):
    return split(documents(*texts), Letters(), train_tokens=train, held_out_tokens=held_out, longest=longest, end=0)


def test_both_parts_have_the_tokens_asked_for_and_share_no_document():
    parts = cut("abcd", "efgh", "ijkl", "mnop", train=7, held_out=8)
    assert [bytes(list(part)) for part in parts.held_out] == [b"abcd\0", b"efg"]
    assert [bytes(list(part)) for part in parts.train] == [b"ijkl\0", b"mn"]


def test_a_long_document_is_cut_and_still_ends():
    parts = cut("abcdefgh", "ijklmnop", train=4, held_out=4, longest=4)
    assert [bytes(list(part)) for part in parts.held_out] == [b"abc\0"]
    assert [bytes(list(part)) for part in parts.train] == [b"ijk\0"]


def test_too_little_text_says_how_much_is_missing():
    with pytest.raises(NotEnoughText, match="91 tokens short"):
        cut("abcd", "efgh", train=96, held_out=5)


def test_the_standard_library_is_read_in_one_mixed_order():
    names = [document.name for document, _ in zip(standard_library(), range(200), strict=False)]
    assert names == [document.name for document, _ in zip(standard_library(), range(200), strict=False)]
    assert len(set(names)) == 200
    assert sum(name.startswith("stdlib/") for name in names) > 100
    assert not [name for name in names if "/test/" in name or "site-packages" in name]


def test_every_character_of_a_text_file_is_in_one_piece(tmp_path: Path):
    text = "\n\n".join(f"paragraph {number} " + "word " * (number % 50) for number in range(200))
    (tmp_path / "my.txt").write_text(text)
    pieces = {document.name: document.text for document in text_file(tmp_path / "my.txt", piece_chars=500)}
    assert len(pieces) > 20
    joined = "".join(pieces[f"my.txt#{number}"] for number in range(len(pieces)))
    assert joined.rstrip() == text.rstrip()
