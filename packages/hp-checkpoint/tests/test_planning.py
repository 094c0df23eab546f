"""Planning for all ranks at once: pieces, writers, files, reads and the exchange, with numpy."""

from __future__ import annotations

import json

import numpy as np
import pytest
from checkpoint_layouts import MESHES, coordinates, placed, tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load as load_safetensors

from hp_checkpoint.disk.files import Chunk, Entry, Kind, index_of, lay_out, read_header
from hp_checkpoint.disk.manifest import FileSums
from hp_checkpoint.disk.storage import read_at
from hp_checkpoint.errors import InvalidCheckpointError
from hp_checkpoint.layout.tensors import Holding, Piece, clip, gather, move, pieces, runs, scale
from hp_checkpoint.loading import reads as reading
from hp_checkpoint.loading.reads import Units, exchange, reads, request_rows
from hp_checkpoint.saving.save_plan import Tensor, shard_sizes, writers
from hp_dtensor import Partial, RaggedShard, Replicate, Shard, StridedShard
from hp_dtensor.layout.sharding import take


def local_of(array, own, count):
    """Take a rank's elements of a flat global array by its pieces."""
    local = np.full(count, -1, dtype=array.dtype)
    for piece in own:
        values = gather(array, piece.first, piece.length, piece.count, piece.stride)
        move(piece.length, piece.count, values, 0, piece.length, local, piece.local, piece.local_stride)
    return local


@settings(deadline=None)
@given(tensors())
def test_pieces_are_the_local_tensor(drawn):
    shape, mesh_shape, placements = drawn
    array = np.arange(int(np.prod(shape)))
    sizes = shard_sizes(shape, placements, mesh_shape)
    for coordinate in coordinates(mesh_shape):
        own = pieces(shape, placements, mesh_shape, coordinate)
        truth = take(array.reshape(shape), placements, mesh_shape, coordinate).reshape(-1)
        assert sizes[coordinate] == truth.size == sum(piece.size for piece in own)
        assert (local_of(array, own, truth.size) == truth).all()


def test_a_column_shard_is_one_piece():
    assert pieces((3, 4), (Shard(1),), (2,), (1,)) == (Piece(2, 2, 3, 4, 0, 2),)
    assert pieces((8, 3, 4), (Shard(2),), (2,), (0,)) == (Piece(0, 2, 24, 4, 0, 2),)
    assert pieces((), (), (), ()) == (Piece(0, 1),)
    assert pieces((8,), (StridedShard(0, 2),), (2,), (1,)) == (Piece(2, 2), Piece(6, 2, local=2))
    assert pieces((0, 3), (Shard(0),), (2,), (0,)) == ()


def test_a_partial_has_no_pieces():
    with pytest.raises(ValueError, match="has a Partial, so no rank has elements of the value. Reduce it first"):
        pieces((4,), (Partial(),), (2,), (0,))


@settings(deadline=None)
@given(
    st.integers(0, 20), st.integers(1, 6), st.integers(1, 6), st.integers(0, 5), st.integers(0, 60), st.integers(0, 60)
)
def test_clip_keeps_what_is_inside(first, length, count, apart, start, stop):
    piece = Piece(first, length, count, length + apart, 7, length) if count > 1 else Piece(first, length, local=7)
    clipped = clip(piece, start, stop)
    truth = {begin + k: local + k for begin, local in runs(piece) for k in range(length) if start <= begin + k < stop}
    listed = [(begin + k, local + k) for each in clipped for begin, local in runs(each) for k in range(each.length)]
    assert len(clipped) <= 3 and len(listed) == len(dict(listed)) and dict(listed) == truth


@settings(deadline=None)
@given(st.lists(tensors(), min_size=1, max_size=5), st.integers(0, 3))
def test_each_element_is_written_once(drawn, copies):
    """Also where the ranks are of several sub-meshes that have the same layouts."""
    world = 8 * (copies + 1)
    described = {}
    for number, (shape, mesh_shape, placements) in enumerate(drawn):
        count = int(np.prod(mesh_shape))
        holdings = [
            Holding(tuple(range(at * count, at * count + count)), mesh_shape, placements) for at in range(copies + 1)
        ]
        described[f"t{number}"] = Tensor(shape, 4, tuple(holdings))
    chosen = writers(described, world)
    for name, tensor in described.items():
        written = np.zeros(int(np.prod(tensor.shape)), dtype=np.int64)
        for holding in tensor.holdings:
            for rank, coordinate in zip(holding.ranks, coordinates(holding.mesh_shape), strict=True):
                if rank in chosen[name]:
                    for piece in pieces(tensor.shape, holding.placements, holding.mesh_shape, coordinate):
                        for start, _ in runs(piece):
                            written[start : start + piece.length] += 1
        assert (written == 1).all()


def test_replicas_are_balanced():
    everywhere = tuple(Holding((rank,)) for rank in range(4))
    described = {f"t{n:02d}": Tensor((n + 1, 100), 4, everywhere) for n in range(40)}
    chosen = writers(described, 4)
    load = [sum(400 * t.shape[0] for name, t in described.items() if rank in chosen[name]) / 400 for rank in range(4)]
    assert all(len(ranks) == 1 for ranks in chosen.values()) and max(load) - min(load) <= 1


def test_files_are_safetensors():
    kinds = {"b": Kind("F32", (2, 3)), "a": Kind("F16", (3,)), "c": Kind("U8", ()), "empty": Kind("F32", (0, 4))}
    (file,) = lay_out("model", kinds)
    assert file.name == "model.safetensors" and len(file.header) % 4096 == 0
    content = bytearray(file.size)
    content[: len(file.header)] = file.header
    offset = next(entry.offset for entry in file.entries if entry.name == "b")
    content[offset : offset + 24] = np.arange(6, dtype="<f4").tobytes()
    loaded = load_safetensors(bytes(content))
    assert loaded["b"].tolist() == [[0, 1, 2], [3, 4, 5]] and loaded["empty"].shape == (0, 4)
    length = int.from_bytes(file.header[:8], "little")
    again = read_header(file.name, file.size, file.header[:8], file.header[8 : 8 + length])
    assert sorted(again, key=lambda entry: entry.name) == sorted(file.entries, key=lambda entry: entry.name)


def test_several_files_have_an_index():
    files = lay_out("model", {f"t{n}": Kind("F32", (10,)) for n in range(5)}, limit=80)
    names = [file.name for file in files]
    assert names == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert index_of(files) == {
        "metadata": {"total_size": 200},
        "weight_map": {"t0": names[0], "t1": names[0], "t2": names[1], "t3": names[1], "t4": names[2]},
    }


def header(text: str, size: int) -> tuple[str, int, bytes, bytes]:
    content = text.encode()
    return "f", size, len(content).to_bytes(8, "little"), content


def described(**changes) -> dict:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("f", 10, (3).to_bytes(8, "little"), b"{}"), r"f: its header would have 3 bytes, and the file has 10"),
        (("f", 2**30, (2 * 10**8).to_bytes(8, "little"), b""), r"has 200000000 bytes, readers of safetensors take"),
        (header("[]", 10), "the header of f is a JSON list, expected an object"),
        (header("{", 10), "the header of f is no JSON"),
        (header('{"a": 1, "a": 2}', 40), "the header of f has the key 'a' twice"),
        (header(json.dumps({"a": {"dtype": "F32"}}), 40), "tensor 'a' is described by .*expected dtype, shape"),
        (header(json.dumps({"a": described(dtype="F3")}), 90), "tensor 'a' has dtype 'F3', which is not one of BOOL"),
        (header(json.dumps({"a": described()}), 70), r"needs 8 bytes, and is said to be at \[0, 8\) of .*cut off"),
        (header(json.dumps({"a": described(), "b": described()}), 200), "the tensors 'a' and 'b' overlap"),
    ],
)
def test_headers_that_are_wrong(arguments, error):
    with pytest.raises(InvalidCheckpointError, match=error):
        read_header(*arguments)


def test_reads_merge_neighbours():
    assert reads([Piece(0, 10), Piece(10, 5)]) == ((0, 15),)
    assert reads([Piece(0, 10), Piece(12, 5)]) == ((0, 17),)
    assert reads([Piece(0, 10), Piece(100, 5)]) == ((0, 10), (100, 105))
    assert reads([Piece(0, 4, 3, 8)]) == ((0, 20),)
    assert reads([Piece(0, 10), Piece(5, 10)]) == ((0, 15),)
    assert reads([Piece(0, 10), Piece(10, 10)], chunk=10) == ((0, 20),)
    assert reads([Piece(0, 10), Piece(11, 10)], chunk=10) == ((0, 10), (11, 21))


@pytest.mark.parametrize(
    "view",
    [np.s_[:], np.s_[2:5], np.s_[:, 3:7], np.s_[:, 3:60], np.s_[:, 5], np.s_[::3, ::5]],
    ids=["all", "rows", "few columns", "most columns", "one column", "steps"],
)
@pytest.mark.parametrize("turned", [False, True])
def test_a_range_of_a_view_is_read_from_the_matrix_that_is_stored(view, turned, tmp_path):
    stored = np.arange(9 * 64, dtype=np.int32).reshape(9, 64)
    _reads_all_ranges(stored, stored[view].T if turned else stored[view], tmp_path)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("call", "block"), [(0, 100), (1000, 100), (1000, 1 << 20)], ids=["runs", "blocks", "one block"]
)
def test_runs_of_a_view_are_read_one_by_one_or_from_blocks(call, block, turned, tmp_path, monkeypatch):
    """By how much is between them; windows that overlap can't be cut by blocks, and are read one by one."""
    monkeypatch.setattr(reading, "_CALL_BYTES", call)
    monkeypatch.setattr(reading, "_RANGE_BYTES", block)
    stored = np.arange(9 * 64, dtype=np.int32).reshape(9, 64)
    windows = np.lib.stride_tricks.sliding_window_view(stored.reshape(-1), 50)
    for array in (stored[::2, 5:8], stored[:, 7], windows[100:105], stored.reshape(9, 8, 8)[::3, 1:3, 2:4]):
        _reads_all_ranges(stored, array.T if turned else array, tmp_path)


def test_a_turned_matrix_takes_few_calls(tmp_path, monkeypatch):
    stored, calls = np.arange(300 * 300, dtype=np.int32).reshape(300, 300), []
    monkeypatch.setattr(reading, "read_at", lambda *each: calls.append(each) or read_at(*each))
    _reads(stored, stored.T, tmp_path, [(0, stored.nbytes)])
    assert len(calls) == 1


def _reads_all_ranges(stored, array, folder):
    ranges = (
        (start, stop) for start in range(0, array.size * 4, 20) for stop in (start + 4, start + 36, array.size * 4)
    )
    _reads(stored, array, folder, ranges)


def _reads(stored, array, folder, ranges):
    """Ranges of the bytes of ``array``, a view of ``stored``, are right when they are read from its file."""
    stored.tofile(folder / "file")
    offset = array.__array_interface__["data"][0] - stored.__array_interface__["data"][0]
    strides = tuple(stride // 4 for stride in array.strides)
    chunk = Chunk((0,) * array.ndim, array.shape, "file", offset, strides)
    entry = Entry("w", Kind("I32", array.shape), "", 0, (chunk,))
    truth = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    for start, stop in ranges:
        got = reading.read_range(entry, folder, start, min(stop, len(truth)))
        assert np.array_equal(got, truth[start:stop]), (array.shape, strides, start, stop)


@settings(deadline=None)
@given(st.data())
def test_any_layout_is_read_from_any_other(data):
    """All ranks at once: a file written by the pieces of one layout, read through the exchange in another."""
    shapes = data.draw(st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=3))
    saved = data.draw(st.sampled_from(MESHES))
    loaded = data.draw(st.sampled_from(MESHES))
    cuts = sorted({0, *data.draw(st.lists(st.integers(1, 4500), max_size=30))})
    names = [f"t{number}" for number in range(len(shapes))]
    (file,) = lay_out("model", {name: Kind("I32", shape) for name, shape in zip(names, shapes)})
    entries = {entry.name: entry for entry in file.entries}
    arrays = {name: np.arange(int(np.prod(shape)), dtype=np.int32) + 1 for name, shape in zip(names, shapes)}
    content = np.zeros(file.size, dtype=np.uint8)
    world = int(np.prod(saved))
    layouts = {name: data.draw(placed(shape, saved)) for name, shape in zip(names, shapes)}
    ranks = tuple(range(world))
    chosen = writers({n: Tensor(entries[n].kind.shape, 4, (Holding(ranks, saved, layouts[n]),)) for n in names}, world)
    for rank, coordinate in enumerate(coordinates(saved)):
        for name in names:
            if rank in chosen[name]:
                truth = take(arrays[name].reshape(entries[name].kind.shape), layouts[name], saved, coordinate)
                local = np.ascontiguousarray(truth).reshape(-1).view(np.uint8)
                for piece in pieces(entries[name].kind.shape, layouts[name], saved, coordinate):
                    at = scale(piece, 4, entries[name].offset)
                    values = gather(local, at.local, at.length, at.count, at.local_stride)
                    move(at.length, at.count, values, 0, at.length, content, at.first, at.stride)
    layouts = {name: data.draw(placed(shape, loaded)) for name, shape in zip(names, shapes)}
    wanted = [
        [
            (name, scale(piece, 4, entries[name].offset))
            for name in names
            for piece in pieces(entries[name].kind.shape, layouts[name], loaded, coordinate)
        ]
        for coordinate in coordinates(loaded)
    ]
    rows = [request_rows((0, piece) for _, piece in each) for each in wanted]
    units = Units([file.size], [[cut for cut in cuts if cut < file.size]])
    plans = [exchange(rows, rank, units, per_round=100) for rank in range(len(rows))]
    assert len({plan.rounds for plan in plans}) == 1 and len({plan.remote for plan in plans}) == 1
    read = [unit for plan in plans for _, unit in plan.units]
    assert len(set(read)) == len(read)
    sent = sorted((t for plan in plans for t in plan.sends), key=repr)
    assert sent == sorted((t for plan in plans for t in plan.receives), key=repr)
    for rank, (plan, coordinate) in enumerate(zip(plans, coordinates(loaded))):
        for other in range(len(plans)):  # both sides have the same order
            theirs = [t for t in plans[other].sends if t.rank == rank]
            assert theirs == [t for t in plan.receives if t.reader == other]
        locals_ = {name: {} for name in names}
        for transfer in plan.receives:
            assert (transfer.round, transfer.unit) in plans[transfer.reader].units
            name, request = wanted[rank][transfer.request]
            for piece in transfer.pieces:
                for start, _ in runs(piece):
                    run, within = divmod(start - request.first, request.stride or request.size)
                    at = request.local + run * request.local_stride + within
                    locals_[name].update(zip(range(at, at + piece.length), content[start : start + piece.length]))
        for name in names:
            truth = take(arrays[name].reshape(entries[name].kind.shape), layouts[name], loaded, coordinate)
            expected = np.ascontiguousarray(truth).reshape(-1).view(np.uint8)
            assert [locals_[name].get(at) for at in range(len(expected))] == expected.tolist()


def test_bytes_that_one_rank_wants_stay_there():
    units = Units([6400], [range(0, 6400, 64)])
    rows = [request_rows([(0, Piece(rank * 640, 640))]) for rank in range(4)]
    plan = exchange(rows, 1, units, per_round=320)
    assert not plan.remote and len(plan.units) == 10 and plan.rounds == 2
    same = [request_rows([(0, Piece(0, 6400))])] * 4
    assert [len(exchange(same, rank, units).units) for rank in range(4)] == [25] * 4


def test_units_are_what_a_checksum_is_of():
    """Contiguous ones of some size; strided ones and small ones are joined, within a block."""
    large, block = 100_000, 300_000
    contiguous = FileSums(500_000, tuple((at, large, 1, 0, 0) for at in range(0, 500_000, large)))
    assert contiguous.cuts(block) == [0, 100_000, 200_000, 300_000, 400_000]
    small = FileSums(120_000, tuple((at, 30_000, 1, 0, 0) for at in range(0, 120_000, 30_000)))
    assert small.cuts(block) == [0, 90_000]
    tail = FileSums(300_000, ((0, 4096, 1, 0, 1), (4096, 195_904, 1, 0, 2), (200_000, 100_000, 1, 0, 3)))
    assert tail.cuts(300_000) == [0, 4096, 200_000]  # a large one is a unit of its own, which its reader wants alone
    strided = FileSums(
        400_000, ((0, 50_000, 3, 100_000, 0), (50_000, 50_000, 3, 100_000, 0), (300_000, large, 1, 0, 0))
    )
    assert strided.cuts(block) == [0, 300_000]
    assert FileSums(400_000, ()).cuts(block) == [0, 300_000]


def test_ragged_units_of_a_flat_buffer():
    assert shard_sizes((3, 4), (RaggedShard((0, 1), (5, 7)),), (2,)).tolist() == [5, 7]
    assert shard_sizes((4, 6), (Replicate(), Shard(1)), (2, 4)).tolist() == [[8, 8, 8, 0]] * 2
