# SPDX-License-Identifier: Apache-2.0
"""Prompt log-probabilities of vLLM and SGLang, one JSON object a line.

In: `*.jsonl` files. Out: records. A line is what the engine answered to one prompt, as it is or wrapped by the batch
API (`response.body`):

- vLLM: `prompt_token_ids` and `prompt_logprobs` (also inside `choices[0]`): null for the first token, then for each
  token an object from token id to `{"logprob": x, "rank": r}`. The token itself is listed whatever its rank.
- SGLang: `meta_info` with `input_token_logprobs` [[logprob, id, text]] and `input_top_logprobs`, null for the first
  token, then for each token a list [[logprob, id, text]].

Entry i of both is about token i, so it describes position i - 1, and nothing is said after the last token.

A line is parsed once; its rows wait in a temporary file (8 bytes an entry, in the system's folder for those) until
their tile is written.
"""

import os
import tempfile
from collections.abc import Iterator
from functools import cached_property
from itertools import chain
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_kd.cache.errors import ImportRefused
from megatron_kd.cache.importers.records import Record, make_record

if TYPE_CHECKING:
    from megatron_kd.cache.importers.answers import Body

_MAX_LINE_BYTES = 1 << 28
_BUFFER_BYTES = 1 << 23
_SETTINGS = ("model", "logprobs_mode", "temperature", "vllm_version", "version")


class JsonLines:
    """The lines of one file, or of all `*.jsonl` files of a folder.

    Args:
        path: file or folder.
    """

    precision = "f32"

    def __init__(self, path: str | Path):
        try:
            from megatron_kd.cache.importers import answers
        except ImportError as error:
            raise ImportRefused("JSON lines are read with msgspec: install megatron-kd[import]") from error
        self._answers, path = answers, Path(path)
        self.files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not self.files or not all(file.is_file() for file in self.files):
            raise ImportRefused(f"{path} is no file, and no folder with *.jsonl files")
        self.settings: dict[str, Any] = {"format": "jsonl"}

    @cached_property
    def _parsed(self) -> Any:
        """The file of parsed rows; it has no name and goes with this object."""
        return tempfile.TemporaryFile(buffering=0)

    def __iter__(self) -> Iterator[tuple[tuple[str, int, tuple[int, int], int], Record]]:
        for file in self.files:
            for number, line in enumerate(_lines(file), 1):
                if len(line) > 64 or bytes(line).strip():
                    record = self._parse(line, f"{file}, line {number}")
                    yield self._keep(record), record

    def _keep(self, record: Record) -> tuple[str, int, tuple[int, int], int]:
        """Write a record to the temporary file; the handle says where."""
        at = self._parsed.seek(0, os.SEEK_END)
        parts = record.tokens.astype("<i4"), record.ids.astype("<i4"), record.logprobs.astype("<f4")
        data = b"".join(part.tobytes() for part in parts)
        try:
            written = self._parsed.write(data)
        except OSError:
            written = 0
        if written != len(data):
            raise ImportRefused(
                f"{tempfile.gettempdir()} takes no more parsed rows; name a folder with more room with TMPDIR"
            )
        return record.where, at, record.ids.shape, len(record.tokens)

    def load(self, handle: tuple[str, int, tuple[int, int], int]) -> Record:
        """The record of one line that was read before."""
        where, at, shape, count = handle
        size = shape[0] * shape[1]
        data = os.pread(self._parsed.fileno(), 4 * (count + 2 * size), at)
        tokens, ids, logprobs = (
            np.frombuffer(data, "<i4", count),
            *(
                np.frombuffer(data, dtype, size, 4 * (count + skip)).reshape(shape)
                for dtype, skip in (("<i4", 0), ("<f4", size))
            ),
        )
        return Record(where, tokens.astype(np.int64), ids.astype(np.int64), logprobs)

    def _parse(self, line: memoryview, where: str) -> Record:
        try:
            body = self._answers.parse(line)
            answer = _answer(body)
            self._note(body, answer, where)
            parse = _vllm if answer.meta_info is None else _sglang
            return parse(answer, where)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise ImportRefused(f"{where} is no answer with prompt log-probabilities: {error!r}") from error

    def _note(self, body: "Body", answer: "Body", where: str) -> None:
        """What the lines say of model and settings must be the same in all of them."""
        for name in _SETTINGS:
            value = getattr(answer, name) if getattr(answer, name) is not None else getattr(body, name)
            if value is not None and self.settings.setdefault(name, value) != value:
                raise ImportRefused(f"{where}: {name} is {value!r}, earlier lines have {self.settings[name]!r}")
        if self.settings.get("temperature", 1) not in (0, 1):
            raise ImportRefused(f"{where}: taken at temperature {self.settings['temperature']}, expected 1")


def _lines(file: Path) -> Iterator[memoryview]:
    """Lines of a file, in a buffer that the next ones overwrite."""
    buffer, held, number = bytearray(_BUFFER_BYTES), 0, 1
    with open(file, "rb", buffering=0) as stream:
        while got := stream.readinto(memoryview(buffer)[held:]):
            held, start = held + got, 0
            while (end := buffer.find(b"\n", start, held)) >= 0:
                yield memoryview(buffer)[start:end]
                start, number = end + 1, number + 1
            buffer[: held - start] = buffer[start:held]
            held -= start
            if held == len(buffer):
                if held >= _MAX_LINE_BYTES:
                    raise ImportRefused(f"{file}, line {number} has more than {_MAX_LINE_BYTES} bytes")
                buffer = buffer + bytes(held)
    yield memoryview(buffer)[:held]


def _answer(body: "Body") -> "Body":
    """The part of a line that holds the log-probabilities."""
    if body.response is not None:
        body = body.response.body or body.response
    if not body.choices:
        return body
    if len(body.choices) != 1:
        raise ValueError(f"expected one choice, found {len(body.choices)}")
    (choice,) = body.choices
    choice.model = body.model
    if choice.prompt_token_ids is None:
        choice.prompt_token_ids = body.prompt_token_ids
    return choice


def _vllm(answer: "Body", where: str) -> Record:
    tokens, rows = answer.prompt_token_ids, answer.prompt_logprobs
    if tokens is None or rows is None:
        raise ValueError("it lacks prompt_token_ids or prompt_logprobs")
    if len(rows) != len(tokens):
        raise ImportRefused(
            f"{where}: {len(rows)} rows of log-probabilities for {len(tokens)} tokens: the answer is not complete"
        )
    rows = rows[1:]
    counts = np.fromiter(map(len, rows), np.int64, len(rows))
    total = int(counts.sum())
    ids = np.fromiter(chain.from_iterable(rows), np.int64, total)
    entries = list(chain.from_iterable(map(dict.values, rows)))
    try:
        values = np.fromiter(map(attrgetter("logprob"), entries), np.float64, total)
        ranks = np.fromiter(map(attrgetter("rank"), entries), np.int64, total)
    except (AttributeError, TypeError):  # some are numbers alone, or have no rank
        values = np.array([x if type(x) is float else x.logprob for x in entries], np.float64)
        ranks = np.array([0 if type(x) is float else x.rank or 0 for x in entries], np.int64)
    return _record(where, tokens, counts, ids, values, ranks)


def _sglang(answer: "Body", where: str) -> Record:
    info = answer.meta_info
    tokens, rows = [token for _, token, _ in info.input_token_logprobs], info.input_top_logprobs
    if len(rows) != len(tokens) or info.prompt_tokens not in (None, len(tokens)):
        raise ImportRefused(
            f"{where}: {len(rows)} rows and {len(tokens)} tokens for a prompt of {info.prompt_tokens} tokens: "
            "the answer is not complete (logprob_start_len must be 0)"
        )
    counts = np.fromiter(map(len, rows[1:]), np.int64, len(rows) - 1 if rows else 0)
    entries = list(chain.from_iterable(rows[1:]))
    ids = np.fromiter(map(itemgetter(1), entries), np.int64, len(entries))
    values = np.fromiter(map(itemgetter(0), entries), np.float64, len(entries))
    return _record(where, tokens, counts, ids, values, np.zeros_like(ids))


def _record(
    where: str, tokens: list[int], counts: np.ndarray, ids: np.ndarray, values: np.ndarray, ranks: np.ndarray
) -> Record:
    """Rows [m, K] from the entries of m rows together; K is what the shortest run of ranks 1, 2, ... has.

    The token itself is listed whatever its rank, so entries behind a gap do not count. Rows with a rank of 0 state
    none, and count as they stand.
    """
    m, width = len(counts), int(counts.max(initial=1))
    row = np.repeat(np.arange(m), counts)
    place = np.arange(len(ids)) - np.repeat(np.cumsum(counts) - counts, counts)
    unranked = np.zeros(m, bool)
    unranked[row[ranks == 0]] = True
    place = np.where(unranked[row], place, ranks - 1)
    kept = (0 <= place) & (place < width)
    row, place = row[kept], place[kept]
    there, all_ids, all_values = np.zeros((m, width + 1), bool), np.zeros((m, width), int), np.zeros((m, width), "f4")
    there[row, place], all_ids[row, place] = True, ids[kept]
    with np.errstate(over="ignore"):
        all_values[row, place] = values[kept]
    complete = there.argmin(1)
    if m and complete.min() == 0:
        raise ImportRefused(f"{where}: no entries for token {complete.argmin() + 1}: the answer is not complete")
    k = int(complete.min(initial=width))
    return make_record(where, np.array(tokens, np.int64), all_ids[:, :k], all_values[:, :k])
