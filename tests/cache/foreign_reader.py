# SPDX-License-Identifier: Apache-2.0
"""A second reader of shards, written from the text of `megatron_kd.cache.layout` alone; it uses nothing of ours."""

import itertools
import json
import struct

import numpy as np
import xxhash
import zstandard

TYPES = {"F32": "<f4", "F16": "<f2", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1"}


def foreign_reader(path, temperatures):
    """Rows of a shard: tokens, list of ids, list of log p, log_tail, tail_T; struct, numpy, zstd and the text only."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    meta = header.pop("__metadata__")
    rows, top_k, bits, values = int(meta["rows"]), int(meta["top_k"]), int(meta["id_hi_bits"]), meta["values"]
    assert json.loads(meta["temperatures"]) == temperatures
    stored = {
        name: np.frombuffer(data[8 + length + begin : 8 + length + end], TYPES[plane["dtype"]]).reshape(plane["shape"])
        for name, plane in header.items()
        for begin, end in [plane["data_offsets"]]
    }
    if "index" not in stored:
        blocks = [
            ({name: p[i : i + 512] for name, p in stored.items() if name != "checksum"}) for i in range(0, rows, 512)
        ]
        for i, block in enumerate(blocks):
            payload = b"".join(block[name].tobytes() for name in header if name != "checksum")
            assert xxhash.xxh3_64_intdigest(payload, seed=int(meta["first_row"]) + 512 * i) == stored["checksum"][i]
    else:
        blocks = []
        for i, (begin, end) in enumerate(itertools.pairwise(stored["index"].tolist())):
            payload = stored["blocks"][begin:end].tobytes()
            assert xxhash.xxh3_64_intdigest(payload, seed=int(meta["first_row"]) + 512 * i) == stored["checksum"][i]
            blocks.append(
                foreign_block(payload, min(512, rows - 512 * i), top_k, bits, values, len(temperatures), meta)
            )
    result = []
    for block in blocks:
        at = 0
        for row, token in enumerate(block["tokens"]):
            count = int(block["count"][row]) if "count" in block else top_k
            if "count" in block:
                place = slice(at, at + count)
                logp, low = block["logprobs"].reshape(-1)[place], block["ids_lo"].reshape(-1)[place]
                high, first_bit = block["ids_hi"].reshape(-1), at * bits
            else:
                logp, low, high, first_bit = block["logprobs"][row], block["ids_lo"][row], block["ids_hi"][row], 0
            at += count
            stream = int.from_bytes(high.tobytes(), "little") >> first_bit
            ids = [int(low[k]) + ((stream >> (k * bits) & ((1 << bits) - 1)) << 16) for k in range(count)]
            if values == "u8":
                first, span = block["first"][row], np.float32(block["span"][row])
                logp = [-np.inf if c == 255 else first - span * np.float32((c / 254) ** 2) for c in logp]
            tail_T = block["tail_T"][row] if temperatures else []
            result.append((int(token), ids, [float(x) for x in logp], float(block["log_tail"][row]), tail_T))
    return result


def foreign_block(payload, n, top_k, bits, values, temperatures, meta):
    """Planes of one block of a blocked shard."""
    ragged, packed = meta["ragged"] == "true", meta["codec"] == "zstd"
    if packed:
        (ids,) = struct.unpack_from("<I", payload)
        lowest, payload = payload[4 : 4 + ids], zstandard.ZstdDecompressor().decompress(payload[4 + ids :])
    count = "|u1" if top_k < 256 else "<u2" if top_k < 65536 else "<u4"
    value = {"f16": "<f2", "f32": "<f4", "u8": "|u1"}[values]
    order = [("log_tail", "<f4", n), ("tail_T", "<f4", n * temperatures)]
    order += [("first", "<f4", n)] if values == "u8" else []
    order += [("tokens", "<u4", n)]
    order += [("logprobs", value, n * top_k)] if values == "f32" else []
    order += [("span", "<f2", n)] if values == "u8" else [("logprobs", value, n * top_k)] if values == "f16" else []
    order += [("ids_lo", "<u2", n * top_k)]
    order += [("logprobs", value, n * top_k)] if values == "u8" else []
    order += [("ids_hi", "|u1", n * -(-top_k * bits // 8))]
    planes, at = {}, 0
    for name, kind, items in ([("count", count, n)] if ragged else []) + [x for x in order if x[2]]:
        if ragged and name in ("logprobs", "ids_lo", "ids_hi"):
            entries = int(planes["count"].sum())
            items = -(-entries * bits // 8) if name == "ids_hi" else entries
        size = np.dtype(kind).itemsize
        if packed and name == "ids_lo":
            raw, at = np.frombuffer(lowest + payload[at : at + items], np.uint8), at + items
        else:
            raw, at = np.frombuffer(payload[at : at + items * size], np.uint8), at + items * size
        if packed and size > 1:
            raw = np.ascontiguousarray(raw.reshape(size, items).T)
        plane = raw.tobytes()
        if packed and name == "logprobs":
            running, whole = 0, []
            for difference in np.frombuffer(plane, f"<u{size}").tolist():
                running = (running + difference) % (1 << 8 * size)
                whole.append(running)
            plane = np.array(whole, f"<u{size}").tobytes()
        planes[name] = np.frombuffer(plane, kind)
    assert at == len(payload)
    if not ragged:
        for name in ("logprobs", "ids_lo", "ids_hi"):
            planes[name] = planes[name].reshape(n, -1)
    if temperatures:
        planes["tail_T"] = planes["tail_T"].reshape(n, -1)
    return planes
