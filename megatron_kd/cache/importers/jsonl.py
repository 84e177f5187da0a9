# SPDX-License-Identifier: Apache-2.0
"""Prompt log-probabilities of vLLM and SGLang, one JSON object a line.

In: `*.jsonl` files. Out: records. A line is what the engine answered to one prompt, as it is or wrapped by the batch
API (`response.body`):

- vLLM: `prompt_token_ids` and `prompt_logprobs` (also inside `choices[0]`): null for the first token, then for each
  token an object from token id to `{"logprob": x, "rank": r}`. The token itself is listed whatever its rank.
- SGLang: `meta_info` with `input_token_logprobs` [[logprob, id, text]] and `input_top_logprobs`, null for the first
  token, then for each token a list [[logprob, id, text]].

Entry i of both is about token i, so it describes position i - 1, and nothing is said after the last token.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megatron_kd.cache.errors import ImportRefused
from megatron_kd.cache.importers.records import Record, make_record

_MAX_LINE_BYTES = 1 << 28


class JsonLines:
    """The lines of one file, or of all `*.jsonl` files of a folder.

    Args:
        path: file or folder.
    """

    precision = "f32"

    def __init__(self, path: str | Path):
        path = Path(path)
        self.files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not self.files or not all(file.is_file() for file in self.files):
            raise ImportRefused(f"{path} is no file, and no folder with *.jsonl files")
        self.settings: dict[str, Any] = {"format": "jsonl"}

    def __iter__(self) -> Iterator[tuple[tuple[Path, int, int], Record]]:
        for file in self.files:
            with open(file, "rb") as stream:
                offset, number = 0, 1
                while line := stream.readline(_MAX_LINE_BYTES):
                    if len(line) == _MAX_LINE_BYTES:
                        raise ImportRefused(f"{file}, line {number} has more than {_MAX_LINE_BYTES} bytes")
                    if line.strip():
                        yield (file, offset, number), self._parse(line, f"{file}, line {number}")
                    offset, number = offset + len(line), number + 1

    def load(self, handle: tuple[Path, int, int]) -> Record:
        """The record of one line."""
        file, offset, number = handle
        with open(file, "rb") as stream:
            stream.seek(offset)
            return self._parse(stream.readline(_MAX_LINE_BYTES), f"{file}, line {number}")

    def _parse(self, line: bytes, where: str) -> Record:
        try:
            body = json.loads(line, parse_constant=_constant)
            answer = _answer(body)
            self._note(body, answer, where)
            parse = _sglang if "meta_info" in answer else _vllm
            return parse(answer, where)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError, RecursionError) as error:
            raise ImportRefused(f"{where} is no answer with prompt log-probabilities: {error!r}") from error

    def _note(self, body: dict[str, Any], answer: dict[str, Any], where: str) -> None:
        """What the lines say of model and settings must be the same in all of them."""
        for name in ("model", "logprobs_mode", "temperature", "vllm_version", "version"):
            value = answer.get(name, body.get(name))
            if isinstance(value, str | int | float) and self.settings.setdefault(name, value) != value:
                raise ImportRefused(f"{where}: {name} is {value!r}, earlier lines have {self.settings[name]!r}")
        if self.settings.get("temperature", 1) not in (0, 1):
            raise ImportRefused(f"{where}: taken at temperature {self.settings['temperature']}, expected 1")


def _constant(text: str) -> float:
    if text == "-Infinity":
        return -np.inf
    raise ValueError(f"{text} is no log-probability")


def _answer(body: dict[str, Any]) -> dict[str, Any]:
    """The part of a line that holds the log-probabilities."""
    if isinstance(body.get("response"), dict):
        body = body["response"].get("body", body["response"])
    choices = body.get("choices")
    if choices:
        if len(choices) != 1:
            raise ValueError(f"expected one choice, found {len(choices)}")
        return {"model": body.get("model"), **{k: v for k, v in body.items() if k == "prompt_token_ids"}, **choices[0]}
    return body


def _vllm(answer: dict[str, Any], where: str) -> Record:
    tokens, rows = answer["prompt_token_ids"], answer["prompt_logprobs"]
    if len(rows) != len(tokens):
        raise ImportRefused(
            f"{where}: {len(rows)} rows of log-probabilities for {len(tokens)} tokens: the answer is not complete"
        )
    entries = [_ranked(row) for row in rows[1:]]
    return _record(where, tokens, entries)


def _ranked(row: dict[str, Any]) -> list[tuple[int, float]]:
    """Entries (id, log-probability) of the longest run of ranks from 1 on; all if there are no ranks."""
    ids = list(map(int, row))
    values = [float(x["logprob"] if isinstance(x, dict) else x) for x in row.values()]
    ranks = [x.get("rank") if isinstance(x, dict) else None for x in row.values()]
    if None in ranks:
        return list(zip(ids, values, strict=True))
    by_rank = dict(zip(map(int, ranks), zip(ids, values, strict=True), strict=True))
    complete = next(rank for rank in range(1, len(by_rank) + 2) if rank not in by_rank)
    return [by_rank[rank] for rank in range(1, complete)]


def _sglang(answer: dict[str, Any], where: str) -> Record:
    info = answer["meta_info"]
    tokens = [entry[1] for entry in info["input_token_logprobs"]]
    rows = info["input_top_logprobs"]
    if len(rows) != len(tokens) or info.get("prompt_tokens", len(tokens)) != len(tokens):
        raise ImportRefused(
            f"{where}: {len(rows)} rows and {len(tokens)} tokens for a prompt of {info.get('prompt_tokens')} tokens: "
            "the answer is not complete (logprob_start_len must be 0)"
        )
    return _record(where, tokens, [[(int(e[1]), float(e[0])) for e in row] for row in rows[1:]])


def _record(where: str, tokens: list[int], rows: list[list[tuple[int, float]]]) -> Record:
    counts = [len(row) for row in rows]
    if rows and min(counts) == 0:
        raise ImportRefused(f"{where}: no entries for token {counts.index(0) + 1}: the answer is not complete")
    k = min(counts, default=1)
    ids = np.array([[token for token, _ in row[:k]] for row in rows], np.int64).reshape(-1, k)
    values = np.array([[value for _, value in row[:k]] for row in rows], np.float32).reshape(-1, k)
    return make_record(where, np.array(tokens, np.int64), ids, values)
