"""Streamed shards: the rows of the local ones from any url, few reads for a batch, tries that end, damage that shows."""

import io
import json
import subprocess
import sys
import tarfile
import threading
from pathlib import Path
from typing import ClassVar

import fsspec
import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from debias_diffusion.captions.augment import RECIPES
from debias_diffusion.data import streamed_reader
from debias_diffusion.data.collate import PixelValues, Row, StepOrder, TextBranches, TrainingRows, epoch_order
from debias_diffusion.data.pack import pack
from debias_diffusion.data.pairs import open_pairs
from debias_diffusion.data.pictures import BadPicture
from debias_diffusion.data.shards import Shards
from debias_diffusion.data.streamed import StreamedShards
from debias_diffusion.data.streamed_index import open_streamed
from debias_diffusion.data.streamed_reader import RemoteFolder, Span, StreamError
from debias_diffusion.data.streamed_tars import tar_index
from debias_diffusion.encoders.checkpoint import BPE_FILE
from debias_diffusion.encoders.encoder import MINIATURE_FOLDER
from debias_diffusion.encoders.tokens import Tokenizer


class Dropping(MemoryFileSystem):
    """A file system in memory that counts its reads and drops the connection at as many of them as it is told to."""

    protocol = "dropping"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    drops = 0
    opened: ClassVar[list[str]] = []

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(path.replace("dropping://", "memory://"))

    def _open(self, path, mode="rb", **more):
        if mode == "rb":
            Dropping.opened.append(path.rsplit("/", 1)[-1])
            if Dropping.drops:
                Dropping.drops -= 1
                raise ConnectionResetError("connection reset by peer")
        return super()._open(path, mode, **more)


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    monkeypatch.setattr(streamed_reader, "DELAYS", (0.0, 0.0))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    fsspec.register_implementation("dropping", Dropping, clobber=True)
    Dropping.store.clear()
    Dropping.drops, Dropping.opened = 0, []


def jpeg(color: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (24, 20), (color, 90, 255 - color)).save(buffer, "JPEG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    """Forty rows as `debias-diffusion pack` leaves them, in shards of unequal size."""
    folder = tmp_path_factory.mktemp("source")
    rng = np.random.default_rng(0)
    for i in range(40):
        noise = Image.fromarray(rng.integers(0, 255, (330, 240, 3), dtype=np.uint8))
        (noise if i % 3 else Image.new("RGB", (60, 50), (6 * i, 0, 9))).save(folder / f"{i:02}.jpg", quality=95)
        (folder / f"{i:02}.txt").write_text(f"Café number {i}. It is the {i}th.")
    output = tmp_path_factory.mktemp("packed") / "set"
    pack(folder, output, short_side=240, shard_mb=1, workers=1)
    return output


@pytest.fixture
def url(packed) -> str:
    """The packed folder in the file system that drops connections."""
    for file in packed.iterdir():
        Dropping().pipe_file(f"/set/{file.name}", file.read_bytes())
    Dropping.opened = []
    return "dropping://set"


def test_a_url_gives_the_rows_of_the_folder(packed):
    local, streamed = Shards.read(packed), open_pairs(f"file://{packed}")
    assert isinstance(streamed, StreamedShards)
    assert len(streamed.names) > 2
    assert list(streamed.keys) == list(local.keys)
    assert list(streamed.captions) == list(local.captions)
    assert streamed.left_out == local.left_out
    for i in (0, 7, 39):
        assert streamed.open(i).tobytes() == local.open(i).tobytes()
        assert streamed.picture(i).open(8).tobytes() == local.picture(i).open(8).tobytes()
        assert streamed.picture(i).identity == local.picture(i).identity


def test_a_batch_is_read_at_once_and_neighbours_in_one_request(url):
    shards = open_streamed(url)
    Dropping.opened = []
    first_of_second = next(i for i in range(40) if shards.rows.place(i)[0] == 1)
    shards.fetch([first_of_second + 1, first_of_second, first_of_second - 1, 2, 1, 39])
    assert sorted(Dropping.opened) == sorted(shards.names[i] for i in (0, 0, 1, shards.rows.place(39)[0]))
    for i in (2, first_of_second, 1, 39):
        shards.open(i)
    assert len(Dropping.opened) == 4
    shards.open(2)  # it was handed out once
    assert len(Dropping.opened) == 5


def test_training_rows_read_a_batch_together(url):
    shards = open_streamed(url)
    branches = TextBranches(Tokenizer(248, MINIATURE_FOLDER / BPE_FILE), RECIPES["debias"], "long-clip", 0)
    images = PixelValues(shards, lambda image: torch.from_numpy(np.array(image)), 8)
    rows = TrainingRows(shards, branches, images)
    Dropping.opened = []
    read: list[Row] = rows.__getitems__([(0, 1), (0, 2)])
    assert len(Dropping.opened) == 1
    assert [row.key for row in read] == [shards.keys[1], shards.keys[2]]
    ready = TrainingRows(shards, branches, lambda index: torch.zeros(3))  # features: no picture is asked for
    ready.__getitems__([(0, 1), (0, 2)])
    assert len(Dropping.opened) == 1


def test_every_block_is_read_once_by_one_process(url):
    shards = open_streamed(url)
    Dropping.opened = []
    for rank in range(2):
        for step in StepOrder(40, 8, 5, seed=1, block=4, rank=rank, world=2):
            shards.fetch([index for _, index in step])
    assert 10 <= len(Dropping.opened) <= 10 + len(shards.names)  # a block that two shards share takes two


def test_a_dropped_connection_is_tried_again(url):
    shards = open_streamed(url)
    Dropping.drops = 2
    shards.fetch([3, 4])
    assert shards.open(3).size == (60, 50)


def test_after_the_last_try_the_error_names_shard_and_row(url):
    shards = open_streamed(url)
    Dropping.drops = 3
    with pytest.raises(
        StreamError, match=r"set/shard-00000\.tar, rows 3 to 4 .*not read in 3 tries.*reset by peer.*--resume"
    ):
        shards.fetch([3, 4])
    assert Dropping.drops == 0


def test_what_a_worker_raises_reads_as_one_line():
    message = "dropping://set/shard-00000.tar, row 3 ('x'): not read"
    assert (
        str(StreamError(f"Caught StreamError in worker 0.\nOriginal Traceback\n  a.b.StreamError: {message}\n"))
        == message
    )


def test_a_missing_shard_is_not_asked_for_again(url):
    Dropping().rm_file("/set/shard-00001.tar")
    with pytest.raises(StreamError, match=r"shard-00001\.tar: there is no such file"):
        open_streamed(url)


def test_a_shard_of_another_size_is_refused_with_both_sizes(url):
    data = Dropping().cat_file("/set/shard-00001.tar")
    Dropping().pipe_file("/set/shard-00001.tar", data[:-512])
    with pytest.raises(
        ValueError, match=rf"shard-00001\.tar: {len(data) - 512:,} bytes, but its index says {len(data):,}"
    ):
        open_streamed(url)


def test_a_shard_cut_while_it_is_read_is_told_by_its_bytes(url):
    shards = open_streamed(url)
    Dropping().pipe_file("/set/shard-00000.tar", Dropping().cat_file("/set/shard-00000.tar")[:900])
    with pytest.raises(StreamError, match=r"shard-00000\.tar, row 1 .*bytes came, .* were expected"):
        shards.open(1)


def test_changed_bytes_are_a_bad_picture(url):
    shards = open_streamed(url)
    data = bytearray(Dropping().cat_file("/set/shard-00000.tar"))
    data[shards.rows.place(1)[2] + 40] ^= 1
    Dropping().pipe_file("/set/shard-00000.tar", bytes(data))
    with pytest.raises(BadPicture, match="not those of the index"):
        shards.open(1)
    shards.open(0)


def change_json(name: str, **fields) -> None:
    """Gives fields of a JSON file of the set other values; None takes a field away."""
    document = {**json.loads(Dropping().cat_file(f"/set/{name}")), **fields}
    content = {key: value for key, value in document.items() if value is not None}
    Dropping().pipe_file(f"/set/{name}", json.dumps(content).encode())


@pytest.mark.parametrize(
    ("name", "fields", "why"),
    [
        ("index.json", {"left_out": None}, r"index\.json: the key 'left_out' is missing"),
        ("index.json", {"left_out": [1]}, r"index\.json: 'left_out' is a list, expected an object"),
        ("index.json", {"left_out": {"x": "y"}}, r"index\.json, 'left_out': 'x' is a string, expected a number"),
        ("shard-00001.json", {"first": None}, r"shard-00001\.json: the key 'first' is missing"),
        ("shard-00001.json", {"next": "x"}, r"shard-00001\.json: 'next' is a string"),
        ("shard-00001.json", {"first": 3}, r"shard-00001\.json: its first row is 3, expected \d+; shards were swapped"),
        ("shard-00001.json", {"next": 10**9}, r"shard-00001\.json: \d+ rows and 0 left out, but it goes from row"),
        ("shard-00001.json", {"left_out": [5]}, r"shard-00001\.json: 'left_out' holds other things"),
    ],
)
def test_a_damaged_index_is_named_at_a_url_and_in_a_folder(url, tmp_path, name, fields, why):
    change_json(name, **fields)
    with pytest.raises(ValueError, match=why):
        open_streamed(url)
    for file in Dropping().ls("/set", detail=False):
        (tmp_path / Path(file).name).write_bytes(Dropping().cat_file(file))
    with pytest.raises(ValueError, match=why):
        Shards.read(tmp_path)


def test_swapped_shards_are_refused(url):
    for suffix in (".tar", ".json"):
        one, two = f"/set/shard-00000{suffix}", f"/set/shard-00001{suffix}"
        first, second = Dropping().cat_file(one), Dropping().cat_file(two)
        Dropping().pipe_file(one, second)
        Dropping().pipe_file(two, first)
    with pytest.raises(ValueError, match=r"shard-00000\.json: its first row is \d+, expected 0; shards were swapped"):
        open_streamed(url)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ([0, "k", "c", 0, 10**12, "d"], "of a shard of"),
        ([0, "k", "c", -1, 5, "d"], "of a shard of"),
        ([0, "k", None, 0, 5, "d"], "is no row"),
        ([0, "k", " \n", 0, 5, "d"], "its caption is blank"),
        ([0, "k", "c", 0, 5], "is no row"),
        ("rows", "is no row"),
    ],
)
def test_an_index_cannot_point_outside_its_shard(url, row, why):
    index = json.loads(Dropping().cat_file("/set/shard-00000.json"))
    index["rows"][1] = row
    Dropping().pipe_file("/set/shard-00000.json", json.dumps(index).encode())
    with pytest.raises(ValueError, match=why):
        open_streamed(url)


def test_an_index_is_kept_while_its_file_stays_as_it_is(url, tmp_path):
    open_streamed(url, tmp_path / "kept")
    Dropping.opened = []
    again = open_streamed(url, tmp_path / "kept")
    assert Dropping.opened == ["index.json"]
    assert len(again) == 40
    for file in (tmp_path / "kept").iterdir():
        file.write_text("[")
    assert len(open_streamed(url, tmp_path / "kept")) == 40
    (tmp_path / "full").write_text("a file where the folder should be")
    assert len(open_streamed(url, tmp_path / "full")) == 40


@pytest.mark.parametrize("url", ["nonsense://x", "dropping://nothing"])
def test_a_wrong_url_says_so(url):
    with pytest.raises((ValueError, StreamError), match=url):
        open_streamed(url)


def tar(members: list[tuple[str, bytes]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def test_webdataset_shards_are_read_in_one_pass(tmp_path):
    files, samples = Dropping(), {"../../a": 1, "b/b": 2}
    members = [
        m for stem, c in samples.items() for m in ((f"{stem}.jpg", jpeg(c)), (f"{stem}.txt", f"Text {c}.".encode()))
    ]
    members += [
        ("._b.jpg", b"x"),
        ("c.json", b'{"caption": "Third.", "key": "k3"}'),
        ("c.jpg", jpeg(3)),
        ("c.cls", b"7"),
    ]
    files.pipe_file("/wds/train-0.tar", tar(members))
    files.pipe_file(
        "/wds/train-1.tar", tar([("d.jpg", jpeg(4)), ("e.txt", b"No picture."), ("f.jpg", jpeg(5)), ("f.txt", b" ")])
    )
    files.pipe_file("/wds/train-2.tar", tar([("g.0.jpg", b"no picture"), ("h.png", jpeg(6)), ("h.txt", b"Six.")]))
    Dropping.opened = []
    shards = open_streamed("dropping://wds/")
    reads = list(Dropping.opened)
    assert reads[0] == "index.json"
    assert sorted(reads[1:]) == ["train-0.tar", "train-1.tar", "train-2.tar"]
    assert list(shards.keys) == ["../../a", "b/b", "k3", "h"]
    assert list(shards.captions) == ["Text 1.", "Text 2.", "Third.", "Six."]
    assert shards.left_out == {"pictures_without_text": 1, "texts_without_picture": 1, "empty_captions": 1}
    shards.fetch([0, 1, 2, 3])
    assert [shards.open(i).getpixel((0, 0))[0] for i in range(4)] == pytest.approx([1, 2, 3, 6], abs=3)
    assert list(open_streamed("dropping://wds/*-2.tar").keys) == ["h"]
    assert list(open_streamed("dropping://wds/train-0.tar").keys) == ["../../a", "b/b", "k3"]
    with pytest.raises(ValueError, match="0 .tar shards, and no picture"):
        open_streamed("dropping://wds/val*.tar")


@pytest.mark.parametrize("stop", [300, 512, 1000, 1536, 1800, -1])
def test_a_cut_tar_is_refused(stop):
    whole = tar([("a.txt", b"x" * 600), ("b.jpg", jpeg(3))])
    Dropping().pipe_file("/wds/a.tar", whole[:stop] if stop > 0 else whole[: len(whole.rstrip(b"\0"))])
    with pytest.raises(ValueError, match=r"wds/a\.tar: not a whole tar file"):
        open_streamed("dropping://wds/a.tar")


def test_ranges_come_in_order_and_a_copy_in_another_process_opens_anew():
    import pickle

    Dropping().pipe_file("/x/f", bytes(range(200)))
    folder = RemoteFolder("dropping://x")
    spans = [Span("f", i, i + 3, "bytes") for i in range(100, 0, -1)]
    assert list(folder.ranges(spans)) == [bytes([i, i + 1, i + 2]) for i in range(100, 0, -1)]
    assert pickle.loads(pickle.dumps(folder)).read("f") == bytes(range(200))


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(0, 2**39), st.integers(0, 9), st.integers(1, 40))
def test_an_order_holds_every_row_once_and_keeps_blocks_together(rows, seed, epoch, block):
    order = epoch_order(rows, seed, epoch, block)
    assert sorted(order.tolist()) == list(range(rows))
    whole = order[: rows // block * block].reshape(-1, block)
    assert bool(((whole - whole[:, :1]) % rows == torch.arange(block)).all())


def test_single_rows_are_shuffled_as_ever_and_blocks_begin_elsewhere_every_epoch():
    generator = torch.Generator().manual_seed(7 * 1_000_003 + 2)
    assert torch.equal(epoch_order(50, 7, 2), torch.randperm(50, generator=generator))
    starts = {int(epoch_order(1000, 7, epoch, 16)[0]) % 16 for epoch in range(20)}
    assert len(starts) > 8
    assert torch.equal(epoch_order(1000, 7, 3, 16), epoch_order(1000, 7, 3, 16))


def tar_with(*members: tuple[str, bytes], pax: dict[str, str] | None = None) -> bytearray:
    """A tar whose last member has these extended headers."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT if pax else tarfile.USTAR_FORMAT) as tar:
        for number, (name, data) in enumerate(members, start=1):
            info = tarfile.TarInfo(name)
            info.size, info.pax_headers = len(data), dict(pax or {}) if number == len(members) else {}
            tar.addfile(info, io.BytesIO(data))
    return bytearray(buffer.getvalue())


def set_header(data: bytearray, name: bytes, size: int, kind: bytes = b"0") -> None:
    """Gives the member `name` a size in base 256, its type and the checksum that fits."""
    at = data.index(name + b"\0")
    header = data[at : at + 512]
    header[124:136] = bytes([0o377 if size < 0 else 0o200]) + (size & ((1 << 88) - 1)).to_bytes(11, "big")
    header[156:157], header[148:156] = kind, b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    data[at : at + 512] = header


SAMPLE = (("a.jpg", b"x" * 600), ("a.txt", b"A caption."), ("b.bin", b"y" * 512), ("c.bin", b"z" * 512))


@pytest.mark.parametrize(
    ("size", "kind", "why"),
    [
        (-2048, b"0", r"'c\.bin' has the size -2,048"),  # back to b.bin's header: tarfile would go round for ever
        (-2048, b"L", r"'c\.bin' has the size -2,048"),
        (1 << 40, b"L", r"header 'c\.bin' has the size 1,099"),
        (1 << 70, b"0", r"'c\.bin' ends at byte 1,180,"),
        (1 << 40, b"0", r"unexpected end of data: 'c\.bin'"),
        (512, b"S", r"'c\.bin' is stored with holes \(GNU sparse\)"),
    ],
)
def test_a_header_that_leads_nowhere_ends_the_pass(size, kind, why):
    data = tar_with(*SAMPLE)
    set_header(data, b"c.bin", size, kind)
    with pytest.raises(ValueError, match=rf"^here/x\.tar: not a whole tar file \(.*{why}"):
        tar_index(io.BytesIO(data), "here/x.tar")


@pytest.mark.parametrize(
    ("pax", "why"),
    [
        ({"size": "-2048"}, r"'c\.bin' at byte .* has the size -2,048"),
        ({"size": str(1 << 70)}, "unexpected end of data"),
        ({"GNU.sparse.map": "0,x"}, "invalid literal"),
        ({"GNU.sparse.map": "0,512", "GNU.sparse.size": "512"}, r"'c\.bin' is stored with holes"),
        ({"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}, "invalid literal|not enough values"),
    ],
)
def test_extended_headers_that_make_no_sense_end_the_pass(pax, why):
    with pytest.raises(ValueError, match=rf"^here/x\.tar: not a whole tar file \(.*({why})"):
        tar_index(io.BytesIO(tar_with(*SAMPLE, pax=pax)), "here/x.tar")


def test_a_broken_header_is_no_connection_fault():
    data = tar_with(*SAMPLE)
    set_header(data, b"c.bin", 1 << 70)
    Dropping().pipe_file("/tars/x.tar", bytes(data))
    Dropping.opened = []
    with pytest.raises(ValueError, match=r"^dropping://tars/x\.tar: not a whole tar file"):
        open_streamed("dropping://tars")
    assert Dropping.opened.count("x.tar") == 1


def test_long_names_and_odd_members_are_no_damage():
    name = "folder/" + "n" * 180
    data = tar_with((f"{name}.jpg", jpeg(3)), (f"{name}.txt", b"A caption."), pax={"comment": "mine"})
    rows = tar_index(io.BytesIO(data), "x")["rows"]
    assert [row[1:3] for row in rows] == [[name, "A caption."]]


@pytest.mark.parametrize(
    "url", ["memory://", "memory:///", "memory://root.tar", "memory://*.tar", "memory:///root.tar/"]
)
def test_shards_at_a_file_systems_root_open(url):
    memory = MemoryFileSystem()
    memory.pipe_file("/root.tar", bytes(tar_with(("a.jpg", jpeg(9)), ("a.txt", b"A caption."))))
    try:
        shards = open_streamed(url)
        assert list(shards.captions) == ["A caption."]
        assert shards.open(0).size == (24, 20)
    finally:
        memory.rm_file("/root.tar")


@pytest.mark.parametrize("url", ["file:///", "file:////"])
def test_the_root_of_the_disk_is_a_folder(url):
    folder = RemoteFolder(url)
    assert folder.url == "file:///"
    assert folder.url_of("x.tar") == "file:///x.tar"
    assert set(folder.names()) == {path.name for path in Path("/").iterdir() if path.is_file()}
    with pytest.raises(StreamError, match=r"^file:///nothing-here\.tar: there is no such file"):
        open_streamed("file:///nothing-here.tar")


def test_a_url_with_nul_is_refused():
    with pytest.raises(ValueError, match=r"'file:///tmp/\\x00x' holds a NUL character"):
        open_pairs("file:///tmp/\0x")


INTERRUPTED = """
import os, signal, threading, time
from debias_diffusion.data.streamed_reader import RemoteFolder

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

def stuck(begun):
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    time.sleep(300)

try:
    list(RemoteFolder("memory://x").together(stuck, [0]))
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_ctrl_c_ends_a_process_whose_read_is_stuck():
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], timeout=120, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "interrupted\n"), ended.stderr


def test_what_is_read_together_comes_in_order_and_its_error_is_raised():
    folder, gate = RemoteFolder("memory://x"), threading.Event()

    def do(number: int) -> int:
        if number == 0:
            gate.wait(10)
        gate.set()
        if number == 20:
            raise StreamError("twenty")
        return number

    assert list(folder.together(do, range(20))) == list(range(20))
    with pytest.raises(StreamError, match="twenty"):
        list(folder.together(do, range(30)))
