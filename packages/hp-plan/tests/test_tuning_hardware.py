"""Tables of machines, and the price of a collective."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_plan.tuning.hardware import KINDS, Hardware, Level, counts_of, counts_of_axes, machines, seconds_of

H100 = Hardware.load("h100-8")
TABLES = st.sampled_from([Hardware.load(name) for name in machines()])


def test_tables_are_read_and_written_back(tmp_path):
    assert machines() == ["910b-8", "a100-8", "cm384", "cpu", "h100-8"]
    for name in machines():
        hardware = Hardware.load(name)
        assert hardware.name == name
        assert hardware.room < hardware.memory
        hardware.write(tmp_path / "own.toml")
        assert Hardware.load(tmp_path / "own.toml") == hardware


def test_an_unknown_name_gets_near_misses_and_the_list():
    with pytest.raises(
        ValueError, match="no hardware 'h100': did you mean 'h100-8'.*910b-8, a100-8, cm384, cpu, h100-8"
    ):
        Hardware.load("h100")
    with pytest.raises(ValueError, match="no hardware 'abacus': There are"):
        Hardware.load("abacus")


def test_a_table_that_is_wrong_is_refused(tmp_path):
    own = tmp_path / "own.toml"
    H100.write(own)
    own.write_text(own.read_text().replace("launch", "lunch"))
    with pytest.raises(ValueError, match="no table of hardware.*lunch"):
        Hardware.load(own)
    faster = Level("network", None, 12e-6, 900e9)
    with pytest.raises(ValueError, match="no more bandwidth"):
        dataclasses.replace(H100, levels=(H100.levels[0], faster))
    with pytest.raises(ValueError, match="memory is more than 0, got 0"):
        dataclasses.replace(H100, memory=0)
    with pytest.raises(ValueError, match="no rate of int8, only of bfloat16"):
        H100.rate("int8")


@settings(deadline=None)
@given(
    TABLES, st.sampled_from(KINDS), st.integers(0, 9), st.integers(1, 600), st.integers(0, 2**34), st.integers(0, 2**34)
)
def test_a_price_never_falls_with_bytes_or_with_ranks(hardware, kind, stride, size, few, many):
    stride, (few, many) = 2**stride, sorted((few, many))
    counts = counts_of_axes(hardware, [(stride, size)])
    assert seconds_of(hardware, kind, few, counts) <= seconds_of(hardware, kind, many, counts)
    more = counts_of_axes(hardware, [(stride, size + 1)])
    assert seconds_of(hardware, kind, few, counts) <= seconds_of(hardware, kind, few, more) * (1 + 1e-12)
    twice = seconds_of(hardware, kind, 2 * few, counts, calls=2)
    assert twice == pytest.approx(2 * seconds_of(hardware, kind, few, counts))


@settings(deadline=None)
@given(TABLES, st.integers(0, 6), st.integers(0, 6), st.integers(0, 4))
def test_axes_are_counted_as_their_ranks_are(hardware, stride, size, other):
    stride, size, other = 2**stride, 2**size, 2**other
    ranks = [i * stride + j * stride * size for i in range(size) for j in range(other)]
    assert counts_of_axes(hardware, [(stride, size), (stride * size, other)]) == counts_of(hardware, ranks)


def test_a_sparse_group_of_two_hosts_pays_the_slower_level():
    sparse, dense = counts_of(H100, [0, 8]), counts_of(H100, range(16))
    assert (sparse, dense) == ((1, 2), (8, 2))
    network = H100.levels[1]
    assert seconds_of(H100, "all_gather", 2**30, sparse) == pytest.approx(
        network.latency + 2**30 / 2 / network.bandwidth
    )
    # Eight ranks a host carry the same bytes over eight links.
    assert seconds_of(H100, "all_gather", 2**30, dense) < seconds_of(H100, "all_gather", 2**30, sparse) / 3
    inside = seconds_of(H100, "all_gather", 2**30, counts_of(H100, [0, 1]))
    assert inside < seconds_of(H100, "all_gather", 2**30, sparse) / 8


def test_an_exchange_has_a_price_of_its_own():
    dense = counts_of(H100, range(16))
    gather, exchange = (seconds_of(H100, kind, 2**30, dense) for kind in ("all_gather", "all_to_all"))
    assert exchange == pytest.approx(7 * 3e-6 + 8 * 12e-6 + 2**30 / 16 * (7 / 450e9 + 8 / 50e9))
    assert exchange > 4 * gather
    assert seconds_of(H100, "all_reduce", 2**30, dense) == 2 * gather
    assert seconds_of(H100, "recv", 2**30, dense) == 0
    assert seconds_of(H100, "send", 2**30, (1, 2)) == pytest.approx(12e-6 + 2**30 / 50e9)
    assert seconds_of(H100, "all_gather", 2**30, (1, 1)) == 0


def test_what_has_no_price_is_refused():
    with pytest.raises(ValueError, match="no price of 'gossip', only of all_gather"):
        seconds_of(H100, "gossip", 1, (8, 1))
    island = dataclasses.replace(H100, levels=H100.levels[:1])
    with pytest.raises(ValueError, match="joins 8 ranks .host., but a group has 16"):
        counts_of_axes(island, [(1, 16)])
