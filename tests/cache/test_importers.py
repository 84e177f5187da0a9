# SPDX-License-Identifier: Apache-2.0
"""Imports from files in the formats of vLLM, SGLang, Hugging Face datasets and DistillKit, against the true rows."""

import json
import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from megatron_kd.cache import CacheReader, DocumentUnits, ImportRefused
from megatron_kd.cache.importers import Columns, DistillKit, JsonLines, import_cache
from megatron_kd.cache.importers.parquet import decode_values
from megatron_kd.cache.verify import verify
from tests.cache.conftest import SUPPORT, TEACHER, VOCAB, random_documents, teacher_rows, write_corpus
from tests.cache.test_commands import run

K = 20
DATA = Path(__file__).parent / "data"


@pytest.fixture
def documents():
    return [*random_documents(3, count=6, longest=60), np.array([7]), np.arange(30)]


@pytest.fixture
def units(tmp_path, documents):
    return DocumentUnits(write_corpus(tmp_path / "corpus", [*documents, documents[0]]))  # one document twice


def vllm_line(tokens, *, k=K, **more) -> dict:
    """An answer of vLLM's server: the token itself is listed too, with its rank, in no order."""
    full = teacher_rows(np.asarray(tokens), SUPPORT)
    rows = [None]
    for i, token in enumerate(tokens[1:]):
        entries = [
            (str(full["ids"][i, j]), {"logprob": float(np.float32(full["logprobs"][i, j])), "rank": j + 1})
            for j in range(k)
        ]
        place = np.flatnonzero(full["ids"][i] == token)
        rank = int(place[0]) + 1 if place.size else 150_000
        entries.insert(0, (str(token), {"logprob": -30.0, "rank": rank, "decoded_token": "?"}))
        rows.append(dict(entries[::-1]) if rank > k else dict(entries[1:]))
    return {"prompt_token_ids": [int(t) for t in tokens], "prompt_logprobs": rows, **more}


def sglang_line(tokens) -> dict:
    full = teacher_rows(np.asarray(tokens), K)
    top = [
        [[float(np.float32(v)), int(i), None] for v, i in zip(*row, strict=True)]
        for row in zip(full["logprobs"][:-1], full["ids"][:-1], strict=True)
    ]
    info = {
        "prompt_tokens": len(tokens),
        "input_token_logprobs": [[None if i == 0 else -1.0, int(t), None] for i, t in enumerate(tokens)],
        "input_top_logprobs": [None, *top],
    }
    return {"text": "x", "meta_info": info}


def write_lines(path: Path, lines: list) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def make(source, units, out, **options):
    settings = {"teacher": TEACHER, "vocab_real": VOCAB, "tile_tokens": 100} | options
    return import_cache(source, units, out, **settings)


def compare(path: Path, units, *, known_last: bool, rtol=2**-10, atol=1e-4, tail_atol=1e-6, exact_ids=True) -> None:
    """Every row of the cache against the truth; last rows of units that the source does not describe are marked."""
    reader = CacheReader(path)
    rows = reader.read(np.array([[0, reader.n_rows]]))
    tokens = np.concatenate([units.tokens(unit) for unit in range(len(units.lengths))])
    np.testing.assert_array_equal(rows.tokens, tokens)
    known = np.ones(len(tokens), bool)
    if not known_last:
        known[np.cumsum(units.lengths) - 1] = False
    true = teacher_rows(tokens, K)
    np.testing.assert_array_equal(np.isneginf(rows.logprobs[:, 0]), ~known)
    assert (rows.log_tail[~known] == 0).all()
    if exact_ids:
        np.testing.assert_array_equal(rows.ids[known], true["ids"][known])
    np.testing.assert_allclose(rows.logprobs[known], true["logprobs"][known], rtol=rtol, atol=atol)
    np.testing.assert_allclose(
        np.exp(rows.log_tail[known]), np.exp(true["log_tail"][known]), rtol=1e-3, atol=tail_atol
    )
    assert verify(path, "tokens", units=units).problems == []


@pytest.mark.parametrize("line", [vllm_line, sglang_line])
def test_answers_of_vllm_and_sglang(tmp_path, documents, units, line):
    order = np.random.default_rng(0).permutation(len(documents))
    source = JsonLines(write_lines(tmp_path / "answers.jsonl", [line(documents[i]) for i in order]))
    result = make(source, units, tmp_path / "c")
    assert (result.units, result.missing, result.foreign) == (len(units.lengths), 0, 0)
    assert result.unknown_rows == len(units.lengths)
    compare(tmp_path / "c", units, known_last=False)
    manifest = CacheReader(tmp_path / "c").manifest
    assert manifest.teacher["tail"] == "derived from f32 values, at least 1e-06"
    assert manifest.top_k == K and manifest.teacher["source"] == {"format": "jsonl"}


def test_wrapped_answers_and_the_command_line(tmp_path, documents, units, capsys):
    """Completions and batch API wrap the answer; settings given are recorded; --top-k folds the rest into the tail."""
    lines = [{"model": "m", "choices": [vllm_line(d)]} for d in documents[:4]]
    lines += [
        {"custom_id": "1", "response": {"body": {"model": "m", "choices": [vllm_line(d)]}}} for d in documents[4:]
    ]
    path = write_lines(tmp_path / "a.jsonl", lines)
    words = ["import", path, "--format", "jsonl", "--corpus", units.corpus.prefix, "--out", tmp_path / "c",
             "--vocab-size", VOCAB, "--teacher", "m", "--engine", "vllm", "--setting", "enable_prefix_caching=false",
             "--no-progress", "--top-k", 10, "--values", "f32"]  # fmt: skip
    assert run(*words) == 0 and "9 positions have no teacher" in capsys.readouterr().out
    assert run(*words) == 0  # again: nothing is left to do
    reader = CacheReader(tmp_path / "c")
    assert reader.manifest.teacher["settings"] == {"enable_prefix_caching": "false"}
    assert reader.manifest.teacher["source"]["model"] == "m"
    rows, true = reader.read(np.array([[0, 5]])), teacher_rows(units.tokens(0)[:5], 10)
    np.testing.assert_allclose(rows.log_tail, true["log_tail"], atol=2e-6)
    np.testing.assert_allclose(rows.logprobs, true["logprobs"], atol=2e-6)


def drop_row(line):
    return line | {"prompt_logprobs": line["prompt_logprobs"][:-1]}


def drop_entries(line):
    return line | {"prompt_logprobs": [None, {}, *line["prompt_logprobs"][2:]]}


def padded_id(line):
    row = line["prompt_logprobs"][1]
    return line | {
        "prompt_logprobs": [None, row | {str(VOCAB + 1): {"logprob": -0.1, "rank": 1}}, *line["prompt_logprobs"][2:]]
    }


def shift_mass(line, by):
    rows = [None if r is None else {t: e | {"logprob": min(e["logprob"] + by, 0)} for t, e in r.items()}
            for r in line["prompt_logprobs"]]  # fmt: skip
    return line | {"prompt_logprobs": rows}


REFUSED = {
    "a row is missing (vllm#14239)": (drop_row, "rows of log-probabilities for .* tokens"),
    "a row is empty": (drop_entries, "no entries for token 1"),
    "padding among the ids (LMOps#331)": (padded_id, f"id {VOCAB + 1} lies outside"),
    "a mass above 1": (lambda line: shift_mass(line, 0.5), "hold a mass of 1"),
    "logits": (lambda line: json.loads(json.dumps(line).replace('"logprob": -', '"logprob": ')), "are these logits"),
    "another corpus": (lambda line: vllm_line([*line["prompt_token_ids"][:-1], 3, 4, 5]), "no unit of the corpus"),
    "NaN": (lambda line: json.dumps(line).replace('"logprob": -', '"logprob": NaN, "x": -', 1), "JSON is malformed"),
    "another temperature": (lambda line: line | {"temperature": 0.7}, "temperature 0.7, expected 1"),
    "no rows": (lambda line: {"prompt_token_ids": [1, 2]}, "it lacks prompt_token_ids"),
    "deep": (lambda line: "[" * 100_000, "no answer"),
    "not an object": (lambda line: "[1]", "Expected `object`"),
    "huge": (lambda line: json.dumps(line).replace('"rank": 2', '"rank": 1e999'), "no answer"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_in_an_answer_is_named_with_its_line(tmp_path, documents, units, case):
    change, message = REFUSED[case]
    lines = [vllm_line(d) for d in documents]
    lines[2] = change(lines[2])
    source = JsonLines(write_lines(tmp_path / "a.jsonl", lines))
    with pytest.raises(ImportRefused, match=rf"a.jsonl, line 3.*({message})"):
        make(source, units, tmp_path / "c")


def test_other_answers_for_the_same_tokens_are_refused(tmp_path, documents, units):
    """vllm#42019: log-probabilities that depend on the order of requests."""
    lines = [vllm_line(d) for d in documents]
    make(JsonLines(write_lines(tmp_path / "a.jsonl", [*lines, lines[1]])), units, tmp_path / "c")
    other = json.loads(json.dumps(lines[1]))
    first = next(iter(other["prompt_logprobs"][1].values()))
    first["logprob"] -= 1e-3
    source = JsonLines(write_lines(tmp_path / "b.jsonl", [*lines, other]))
    with pytest.raises(ImportRefused, match="b.jsonl, line 2 and .*line 9 have the same tokens and other rows"):
        make(source, units, tmp_path / "d")
    lines[3]["model"], lines[2]["model"] = "a", "b"
    with pytest.raises(ImportRefused, match="line 4: model is 'a', earlier lines have 'b'"):
        make(JsonLines(write_lines(tmp_path / "e.jsonl", lines)), units, tmp_path / "e")


def test_missing_documents_are_refused_or_marked(tmp_path, documents, units):
    lines = [vllm_line(d) for d in documents[:-2]] + [vllm_line([1, 2, 3])]
    source = JsonLines(write_lines(tmp_path / "a.jsonl", lines))
    with pytest.raises(ImportRefused, match="line 7: no unit of the corpus"):
        make(source, units, tmp_path / "c")
    with pytest.raises(ImportRefused, match=r"2 of 9 units have no record.*the first is document 6"):
        make(JsonLines(write_lines(tmp_path / "b.jsonl", lines[:-1])), units, tmp_path / "c")
    result = make(source, units, tmp_path / "c", partial=True)
    assert (result.missing, result.foreign, result.unknown_rows) == (2, 1, 7 + 31)
    reader = CacheReader(tmp_path / "c")
    starts = np.cumsum(units.lengths) - units.lengths
    rows = reader.read(np.array([[int(starts[6]), 31]]))
    assert np.isneginf(rows.logprobs).all() and (rows.log_tail == 0).all()


def test_fewer_entries_than_asked_for_are_refused(tmp_path, documents, units):
    """vllm#16546: the server's max_logprobs was smaller."""
    source = JsonLines(write_lines(tmp_path / "a.jsonl", [vllm_line(d, k=5) for d in documents]))
    with pytest.raises(ImportRefused, match="rows have 5 entries, 20 are wanted; use --top-k 5"):
        make(source, units, tmp_path / "c", top_k=20)


def write_columns(path: Path, documents, *, predicts="next", dtype=None, extra=0) -> Path:
    dtype = dtype or pa.float32()
    tokens, ids, values = [], [], []
    for document in documents:
        rows = teacher_rows(document, K)
        n = len(document)
        blank = [[]] if predicts == "same" else []
        tokens.append(document.tolist())
        ids.append(blank + rows["ids"][: n - 1 + extra].tolist())
        values.append(blank + rows["logprobs"][: n - 1 + extra].tolist())
    columns = {
        "input_ids": pa.array(tokens, pa.list_(pa.int64())),
        "top_ids": pa.array(ids, pa.list_(pa.list_(pa.int32()))),
        "top_logprobs": pa.array(
            [[np.array(row, dtype.to_pandas_dtype()) for row in rows] for rows in values], pa.list_(pa.list_(dtype))
        ),
    }
    path.mkdir()
    pq.write_table(pa.table(columns), path / "train-00000-of-00001.parquet", row_group_size=3)
    return path


NAMES = {"tokens": "input_ids", "ids": "top_ids", "logprobs": "top_logprobs"}


@pytest.mark.parametrize("predicts,extra", [("next", 0), ("same", 0), ("next", 1)])
def test_a_dataset_with_columns(tmp_path, documents, units, predicts, extra):
    path = write_columns(tmp_path / "dataset", documents, predicts=predicts, extra=extra)
    result = make(Columns(path, **NAMES, predicts=predicts), units, tmp_path / "c")
    assert result.unknown_rows == (0 if extra else len(units.lengths))
    compare(tmp_path / "c", units, known_last=bool(extra))


def test_half_precision_needs_consent_and_is_marked(tmp_path, documents, units):
    path = write_columns(tmp_path / "dataset", documents, dtype=pa.float16())
    with pytest.raises(ImportRefused, match="values are f16.*known only to 0.001.*--accept-derived-tail"):
        make(Columns(path, **NAMES, predicts="next"), units, tmp_path / "c")
    make(Columns(path, **NAMES, predicts="next"), units, tmp_path / "c", accept_derived_tail=True)
    compare(tmp_path / "c", units, known_last=False, atol=4e-3, tail_atol=3e-3, exact_ids=False)
    assert "f16 values, at least 0.001" in CacheReader(tmp_path / "c").manifest.teacher["tail"]


def test_columns_that_do_not_fit_are_named(tmp_path, documents, units):
    path = write_columns(tmp_path / "dataset", documents)
    with pytest.raises(ImportRefused, match="no column.*'nothing'.*it has .*top_ids"):
        make(Columns(path, **NAMES | {"ids": "nothing"}, predicts="next"), units, tmp_path / "c")
    with pytest.raises(ImportRefused, match="row group 0, row 0: .* rows for .* tokens: the rows are not complete"):
        make(Columns(path, **NAMES, predicts="same"), units, tmp_path / "c")
    with pytest.raises(ImportRefused, match="row 0"):
        make(Columns(path, **NAMES | {"tokens": "top_ids"}, predicts="next"), units, tmp_path / "c")
    file = path / "train-00000-of-00001.parquet"
    data = bytearray(file.read_bytes())
    refused = 0
    for at in range(0, len(data), 97):  # whatever pyarrow makes of it, only our own error comes out
        broken = bytearray(data)
        broken[at : at + 6] = b"\xff" * 6
        file.write_bytes(broken)
        try:
            make(Columns(path, **NAMES, predicts="next"), units, tmp_path / f"c{at}")
        except ImportRefused as error:
            refused += "train-00000" in str(error)
    assert refused > 5
    with pytest.raises(ImportRefused, match="no file"):
        Columns(tmp_path / "nowhere", **NAMES, predicts="next")


CONFIGS = {
    "exact": {"exact_k": K, "exact_dtype": "float32", "residual_bins": [], "delta_encoding": False},
    "bins": {
        "exact_k": 4,
        "exact_dtype": "bfloat16",
        "residual_bins": [
            {"scale_dtype": "float32", "element_bits": 11, "num_elements": 9},
            {"scale_dtype": "float16", "element_bits": 5, "num_elements": 7},
        ],
    },
}


def pack(values: np.ndarray, bits: int) -> np.ndarray:
    """Integers [m, n], most significant bit first, to bytes."""
    stream = (values[..., None] >> np.arange(bits - 1, -1, -1)) & 1
    return np.packbits(stream.reshape(len(values), -1).astype(np.uint8), axis=-1)


def encode(logprobs: np.ndarray, config: dict) -> np.ndarray:
    """DistillKit's bytes of values, from its format alone (no polynomial)."""
    values = np.asarray(logprobs, np.float64)
    if config.get("delta_encoding", True):
        values = np.diff(values, axis=1, prepend=0)
    exact = values[:, : config["exact_k"]].astype(np.float32)
    if config["exact_dtype"] == "bfloat16":
        exact = (np.ascontiguousarray(exact).view(np.uint32) >> 16).astype("<u2")
    parts = [np.ascontiguousarray(exact).view(np.uint8).reshape(len(values), -1)]
    at = config["exact_k"]
    for block in config["residual_bins"]:
        part, half = values[:, at : at + block["num_elements"]], 2 ** (block["element_bits"] - 1)
        scale = (np.abs(part).max(1, keepdims=True) / half).astype(block["scale_dtype"])
        steps = np.clip(np.rint(part / scale.astype(np.float64)), -half, half - 1).astype(np.int64) + half
        parts += [scale.view(np.uint8).reshape(len(values), -1), pack(steps, block["element_bits"])]
        at += block["num_elements"]
    return np.concatenate(parts, axis=1)


def write_distillkit(path: Path, documents, config: dict, *, pad: int = 5) -> Path:
    """As its sampler does: a padding token after each document, rows for all tokens but the first."""
    rows = [teacher_rows(document, K) for document in documents]
    bits = int(np.ceil(np.log2(VOCAB)))
    nested = pa.list_(pa.list_(pa.uint8()))
    columns = {
        "input_ids": pa.array([[*d.tolist(), pad] for d in documents], pa.list_(pa.uint64())),
        "compressed_logprobs": pa.array([encode(r["logprobs"], config).tolist() for r in rows], nested),
        "bytepacked_indices": pa.array([pack(r["ids"], bits).tolist() for r in rows], nested),
    }
    path.mkdir()
    pq.write_table(pa.table(columns), path / "data_0.parquet")
    (path / "compression_config.yaml").write_text(yaml.safe_dump({"d": VOCAB, "k": K, **config}))
    return path


@pytest.mark.parametrize("name", CONFIGS)
def test_distillkits_rows(tmp_path, documents, units, name):
    """The padding token it appends lets the last row of each document be known too."""
    source = DistillKit(write_distillkit(tmp_path / "dk", documents, CONFIGS[name]))
    result = make(source, units, tmp_path / "c", accept_derived_tail=name != "exact")
    assert result.unknown_rows == 0 and result.units == len(units.lengths)
    if name == "exact":
        compare(tmp_path / "c", units, known_last=True)
    else:
        assert source.precision == "approximate"
        compare(tmp_path / "c", units, known_last=True, atol=0.1, tail_atol=2e-2, exact_ids=False)


def test_files_that_distillkits_own_code_wrote(tmp_path):
    """Values and ids of `data/distillkit`, compressed by DistillKit a61c2e7d, against what its own decoder gives."""
    expected = np.load(DATA / "distillkit" / "expected.npz", allow_pickle=False)
    source = DistillKit(DATA / "distillkit")
    ((_, record),) = list(source)
    np.testing.assert_array_equal(record.tokens, expected["tokens"])
    order = np.lexsort((expected["ids"], -np.minimum(expected["logprobs"], 0)), axis=-1)
    np.testing.assert_array_equal(record.ids, np.take_along_axis(expected["ids"], order, -1))
    np.testing.assert_allclose(
        record.logprobs, np.take_along_axis(np.minimum(expected["logprobs"], 0), order, -1), atol=2e-4
    )


def test_hostile_distillkit_folders_are_refused(tmp_path, documents, units):
    path = write_distillkit(tmp_path / "dk", documents, CONFIGS["bins"])
    config = path / "compression_config.yaml"
    body = yaml.safe_load(config.read_text())
    texts = ["!!python/object/apply:os.system ['true']", "[1", "a: b", "", "&a [*a, *a]"]
    texts += [yaml.safe_dump(body | change) for change in (
        {"k": 10**9}, {"k": -1}, {"exact_k": 50}, {"d": 2**40}, {"exact_dtype": "f8"}, {"polynomial_terms": ["x"]},
        {"residual_bins": [{"scale_dtype": "float32", "element_bits": 10**6, "num_elements": 1}]},
        {"residual_bins": [{"scale_dtype": "float32", "element_bits": 8, "num_elements": 10**9}]},
    )]  # fmt: skip
    for text in texts:
        config.write_text(text)
        with pytest.raises(ImportRefused, match="compression_config.yaml"):
            DistillKit(path)
    for change, message in (({"exact_k": 3}, "bytes"), ({"d": 2**20}, "bytes of ids"), ({"k": K + 1}, "bytes of ids")):
        config.write_text(yaml.safe_dump(body | change))
        with pytest.raises(ImportRefused, match=message):
            make(DistillKit(path), units, tmp_path / "c", accept_derived_tail=True)
    config.unlink()
    with pytest.raises(ImportRefused, match="is missing"):
        DistillKit(path)


def test_polynomial_terms_are_functions_of_the_position():
    """Coefficients 2, -0.5 and 1 of t^0, t and sqrt(t), no residual."""
    config = {"k": 6, "exact_k": 1, "exact_dtype": "float32", "polynomial_terms": [0, 1, "sqrt"],
              "term_dtype": "float32", "residual_bins": [], "delta_encoding": False, "normalize_t": False}  # fmt: skip
    data = np.array([[-0.25, 2.0, -0.5, 1.0]], "<f4").view(np.uint8)
    t = np.arange(5)
    np.testing.assert_allclose(decode_values(data, config, "x")[0], [-0.25, *(2 - 0.5 * t + np.sqrt(t))], rtol=1e-6)
    t = np.linspace(0, 1, 5)
    found = decode_values(data, config | {"normalize_t": True, "delta_encoding": True}, "x")[0]
    np.testing.assert_allclose(found, np.cumsum([-0.25, *(2 - 0.5 * t + np.sqrt(t))]), rtol=1e-6)


def test_no_importer_loads_a_pickle(tmp_path, units):
    """Pickles under the names of each format: refused, and the trap in them does not spring."""

    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "sprung",))

    data = pickle.dumps(Trap())
    (tmp_path / "dk").mkdir()
    (tmp_path / "dk" / "data_0.parquet").write_bytes(data)
    (tmp_path / "dk" / "compression_config.yaml").write_bytes(data)
    (tmp_path / "a.jsonl").write_bytes(data)
    for source in (
        lambda: JsonLines(tmp_path / "a.jsonl"),
        lambda: DistillKit(tmp_path / "dk"),
        lambda: Columns(tmp_path / "dk", **NAMES, predicts="next"),
    ):
        with pytest.raises(ImportRefused):
            make(source(), units, tmp_path / "c", accept_derived_tail=True)
    assert not (tmp_path / "sprung").exists()


def test_an_import_is_encoded_like_a_build(tmp_path, documents, units):
    """--codec and --top-p: as few entries as hold the mass, the rest in the tail."""
    path = write_lines(tmp_path / "a.jsonl", [vllm_line(d) for d in documents])
    words = ["import", path, "--format", "jsonl", "--corpus", units.corpus.prefix, "--out", tmp_path / "c",
             "--vocab-size", VOCAB, "--teacher", "m", "--no-progress", "--values", "f32", "--codec", "zstd",
             "--top-p", 0.3]  # fmt: skip
    assert run(*words) == 0
    reader = CacheReader(tmp_path / "c")
    assert (reader.manifest.codec, reader.manifest.top_p, reader.manifest.ragged) == ("zstd", 0.3, True)
    rows, true = reader.read(np.array([[0, 5]])), teacher_rows(units.tokens(0)[:5], K)
    mass = np.exp(true["logprobs"]).cumsum(1)
    kept = np.append(np.ones((5, 1), bool), mass[:, :-1] < 0.3, axis=1)
    assert kept.sum() < kept.size
    np.testing.assert_array_equal(rows.ids, np.where(kept, true["ids"], -1))
    tail = np.exp(true["log_tail"]) + np.where(kept, 0, np.exp(true["logprobs"])).sum(1)
    np.testing.assert_allclose(np.exp(rows.log_tail), tail, atol=2e-6)


def test_lines_longer_than_the_buffer_and_numbers_that_json_does_not_have(tmp_path, documents, units, monkeypatch):
    """The buffer grows to the longest line; no newline at the end; -Infinity, and entries that are numbers alone."""
    monkeypatch.setattr("megatron_kd.cache.importers.jsonl._BUFFER_BYTES", 100)
    lines = [vllm_line(d) for d in documents]
    for row in lines[1]["prompt_logprobs"][1:]:
        row["0"] = {"logprob": -np.inf, "rank": K + 1}
    lines[2]["prompt_logprobs"][1:] = [
        {token: entry["logprob"] for token, entry in row.items() if entry["rank"] <= K}
        for row in lines[2]["prompt_logprobs"][1:]
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("\n\n".join(map(json.dumps, lines)))
    make(JsonLines(path), units, tmp_path / "c", top_k=K)
    compare(tmp_path / "c", units, known_last=False)
