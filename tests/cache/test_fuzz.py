# SPDX-License-Identifier: Apache-2.0
"""Hostile and damaged files: nothing of ours runs code, allocates without bound, hangs or leaves the cache's folder.

All attacks run in forked children with little memory and a hook on every file opened and every piece of code loaded.
"""

import json
import os
import random
import resource
import shutil
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest

from megatron_kd.cache import CacheError, CacheReader, CacheWriter
from megatron_kd.cache.commands import describe
from megatron_kd.cache.files import encode_record
from megatron_kd.cache.layout import plane_offsets, shard_header
from megatron_kd.cache.manifest import Manifest, decode_tiles, encode_tiles
from megatron_kd.cache.verify import verify
from tests.cache.conftest import build, random_documents, write_corpus
from tests.cache.faults import child, wait

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # children of fork only write files

FILES = ["manifest.json", "tiles.npy", "SEALED.json", "commits/shard-000000.json", "shards/shard-000000.safetensors"]
ROOM = 1 << 28
"""Address space that a child may add to what it has: 256 MiB."""
HOSTILE = [
    *(-1, 0, 2**31, 2**53 + 1, 2**62, 2**63, 2**64, 10**400, 1e308, 0.5, True, None, "", "raw", "../../../etc/passwd"),
    *(
        "/etc/passwd",
        "shards/../../x",
        "\x00",
        "\ud800",
        "\x1b[2J",
        "x" * 9_000,
        [],
        {},
        [[]],
        {"a": {"b": {"c": 1}}},
    ),
    *([2.0] * 2_000, {str(i): i for i in range(300)}, {"__reduce__": "os.system", "__class__": "x"}),
]


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    corpus = write_corpus(folder / "corpus", random_documents(9, count=4, longest=60))
    return build(folder / "cache", corpus, top_k=3, tile_tokens=60, temperatures=(2.0,)).path


def use(path: Path) -> bool:
    """Everything that reads a cache. True if something was refused; only `CacheError` may come out."""
    refused = bool(verify(path, "checksums").problems)
    for action in (lambda: describe(path), lambda: CacheReader(path, wait_s=0).read(np.array([[0, 5]]))):
        try:
            action()
        except CacheError as error:
            assert str(error).replace("\n", "").isprintable()
            refused = True
    return refused


def confined(folder: Path, attack) -> None:
    """Run `attack` in a child that may open nothing outside `folder`, load no code and take little memory."""
    use(folder / "cache")  # whatever is imported late is imported now

    def work():
        events = []

        def hook(event, arguments):
            if event == "open" and not str(os.fsdecode(arguments[0])).startswith((str(folder), "/proc/")):
                events.append((event, arguments))
            elif event in ("exec", "compile", "import", "marshal.loads", "pickle.find_class", "os.system"):
                events.append((event, arguments))
            elif event in ("subprocess.Popen", "os.exec", "os.posix_spawn", "ctypes.dlopen", "socket.connect"):
                events.append((event, arguments))

        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, size + ROOM))
        sys.addaudithook(hook)
        try:
            attack()
        except BaseException:
            events.clear()  # printing a traceback reads sources
            traceback.print_exc()
            os._exit(1)
        assert events == [], events[:5]

    assert wait(child(work)) == 0


def test_the_hook_would_see_a_file_outside(small, tmp_path):
    shutil.copytree(small, tmp_path / "cache")
    with pytest.raises(AssertionError):
        confined(tmp_path, lambda: (small / "manifest.json").read_bytes())
    with pytest.raises(AssertionError):
        confined(tmp_path, lambda: np.zeros(2 * ROOM, np.uint8))


def mutations(rng: random.Random, data: bytes):
    """Damaged variants of a file's bytes."""
    for _ in range(25):
        at, length = rng.randrange(len(data)), rng.randrange(1, 40)
        piece = data[at : at + length]
        yield data[:at] + rng.randbytes(length) + data[at + length :]
        yield data[:at] + data[at + length :]
        yield data[:at] + piece * rng.randrange(2, 2000) + data[at:]
        yield data[:at] + data[rng.randrange(len(data)) :]
        yield (
            data[:at]
            + rng.choice([b"1e999", b"NaN", b"9" * 5000, b"[" * 9999, b'{"a":', b"\\ud800", b"\xff"])
            + data[at:]
        )
    yield b""
    yield b"[" * 500_000
    yield b'{"a":' * 200_000
    yield b"9" * 1_000_000
    yield b'{"checksum": "0", "checksum": "0"}'
    yield b"\x80\x04\x95cos\nsystem\n(S'touch /tmp/x'\ntR."  # a pickle


@pytest.mark.parametrize(
    "name,settings", [*((name, None) for name in FILES), (FILES[-1], {"codec": "zstd", "values": "u8", "top_p": 0.8})]
)
def test_random_damage_is_refused(small, tmp_path, name, settings):
    """Some 130 mutations of each kind of file: spliced, cut, repeated, deep, huge."""
    if settings is None:
        shutil.copytree(small, tmp_path / "cache")
    else:
        corpus = write_corpus(tmp_path / "corpus", random_documents(9, count=4, longest=60))
        build(tmp_path / "cache", corpus, top_k=30, tile_tokens=60, **settings)
    path = tmp_path / "cache" / name
    sound = path.read_bytes()

    def attack():
        for data in mutations(random.Random(name), sound):
            path.write_bytes(data)
            assert data == sound or use(tmp_path / "cache"), data[:200]

    confined(tmp_path, attack)


def reseal(path: Path, manifest: bytes, tiles: bytes | None = None) -> None:
    """Make every record and header agree with a hostile manifest, as far as one can be made of it."""
    cache = path / "cache"
    (cache / "manifest.json").write_bytes(manifest)
    if tiles is not None:
        (cache / "tiles.npy").write_bytes(tiles)
    try:
        read = Manifest.from_json(manifest)
        table = decode_tiles((cache / "tiles.npy").read_bytes(), read, "tiles.npy")
    except CacheError:
        return
    count, first = read.tiles["count"], int(table[1, 0])
    seal = {"manifest": read.digest(), "rows": read.rows, "tiles": count, "shards": "0" * 32}
    (cache / "SEALED.json").write_bytes(encode_record(seal))
    header = shard_header(read.row_format, tile=0, first_row=0, rows=first, manifest_digest=read.digest())
    size = plane_offsets(read.row_format, first, len(header))[1]
    with open(cache / "shards" / "shard-000000.safetensors", "wb") as stream:
        stream.write(header)
        if size < 1 << 40:
            stream.truncate(size)
    commit = {"tile": 0, "rows": first, "bytes": size, "digest": "0" * 32, "manifest": read.digest(), "writer": {}}
    (cache / "commits" / "shard-000000.json").write_bytes(encode_record(commit))


def test_hostile_values_with_right_checksums(small, tmp_path):
    """Each field of the manifest replaced by each hostile value, each sub-field by some; all records agree with it."""
    shutil.copytree(small, tmp_path / "cache")
    sound = json.loads((small / "manifest.json").read_bytes())
    sound.pop("checksum")
    places = [(key,) for key in sound] + [(a, b) for a in sound if isinstance(sound[a], dict) for b in sound[a]]

    def attack():
        for number, place in enumerate(places):
            for value in HOSTILE if len(place) == 1 else HOSTILE[number % 3 :: 3]:
                body = json.loads(json.dumps(sound))
                part = body
                for key in place[:-1]:
                    part = part[key]
                part[place[-1]] = value
                reseal(tmp_path, encode_record(body))
                use(tmp_path / "cache")

    confined(tmp_path, attack)


@pytest.mark.parametrize("top_k,temperatures", [(300_000, 1), (3, 200_000), (2**31, 1)])
def test_rows_of_any_size_take_bounded_memory(small, tmp_path, top_k, temperatures):
    """A sealed cache whose rows are huge, on sparse files: refused, or read within the bound."""
    shutil.copytree(small, tmp_path / "cache")
    body = json.loads((small / "manifest.json").read_bytes())
    body.pop("checksum")
    body |= {"top_k": top_k, "vocab_real": max(top_k, 200_000), "vocab_padded": 2**31, "values": "f16"}
    body |= {"id_hi_bits": 16 if top_k >= 2**24 else 4 if top_k > 2**18 else 2}
    body["temperatures"] = [2.0 + i for i in range(temperatures)]

    def attack():
        reseal(tmp_path, encode_record(body))
        assert use(tmp_path / "cache")

    confined(tmp_path, attack)


def test_hostile_tile_tables(small, tmp_path):
    """Tables whose digest is right and whose content is not: overlapping, negative, overflowing, absurdly long."""
    shutil.copytree(small, tmp_path / "cache")
    sound = json.loads((small / "manifest.json").read_bytes())
    sound.pop("checksum")
    rows, units = sound["rows"], sound["units"]["count"]
    low, high = -(2**63), 2**63 - 1
    tables = [
        [[0, 0], [low, 1], [rows, units]],
        [[0, 0], [high, 1], [rows, units]],
        [[0, 0], [rows, 1], [rows, units]],
        [[0, 0], [5, high], [rows, units]],
        [[0, 0], [5, -1], [rows, units]],
        [[0, 0], [5, 1], [rows, units + 1]],
        [[5, 0], [6, 1], [rows, units]],
        [[0, 0]],
    ]

    def attack():
        from megatron_kd.cache.files import digest_bytes

        for table in tables:
            data = encode_tiles(np.array(table, "<i8"))
            body = sound | {"tiles": {"count": max(len(table) - 1, 1), "tokens": 60, "digest": digest_bytes(data)}}
            reseal(tmp_path, encode_record(body), data)
            assert use(tmp_path / "cache")
        body = sound | {"rows": 2**40, "tiles": {"count": 1 << 36, "tokens": 1, "digest": "0"}}
        reseal(tmp_path, encode_record(body))
        os.truncate(tmp_path / "cache" / "tiles.npy", 16 << 36)
        assert use(tmp_path / "cache")

    confined(tmp_path, attack)


@pytest.mark.parametrize(
    "name,target",
    [*((name, kind) for name in FILES for kind in ("outside", "/dev/zero", "pipe"))]
    + [("shards", "outside"), ("commits", "outside")],
)
def test_links_and_special_files_are_refused(small, tmp_path, name, target):
    """A link to a right copy elsewhere or to an endless device, a pipe nobody writes to: named, never followed."""
    (tmp_path / "inside").mkdir()
    shutil.copytree(small, tmp_path / "inside" / "cache")
    path = tmp_path / "inside" / "cache" / name
    shutil.move(path, tmp_path / "elsewhere")
    if target == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path / "elsewhere" if target == "outside" else target)

    def attack():
        assert any(path.name in problem for problem in verify(path.parents[name.count("/")]).problems)
        with pytest.raises(CacheError, match=f"{path.name}.* (is a symbolic link|is not a regular file)"):
            CacheReader(tmp_path / "inside" / "cache", wait_s=0).read(np.array([[0, 5]]))

    shutil.copytree(small, tmp_path / "inside" / "warm")
    attack() if target != "outside" else confined_to(tmp_path / "inside", attack)


def confined_to(folder: Path, attack) -> None:
    (folder / "cache").rename(folder / "held")
    (folder / "warm").rename(folder / "cache")

    def swapped():
        os.rename(folder / "cache", folder / "warm")
        os.rename(folder / "held", folder / "cache")
        attack()

    confined(folder, swapped)


@pytest.mark.parametrize("name", ["shards", "commits", "tmp", "quarantine"])
def test_a_writer_does_not_write_through_a_link(small, tmp_path, name):
    shutil.copytree(small, tmp_path / "cache")
    shutil.rmtree(tmp_path / "cache" / name)
    (tmp_path / "outside").mkdir()
    (tmp_path / "cache" / name).symlink_to(tmp_path / "outside")
    reader = CacheReader(small)
    with pytest.raises(CacheError, match=f"{name} must be a folder of the cache itself"):
        CacheWriter(tmp_path / "cache", reader.manifest, reader.tiles)
    assert not any((tmp_path / "outside").iterdir())
