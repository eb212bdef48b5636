"""The picture shows what the manager holds: every number in it is checked against the manager."""

from __future__ import annotations

import re

import pytest

from pagedkv.block_manager import BlockManager
from pagedkv.inspect import copy_on_write_example, draw_cache


def pool_cells(picture: str) -> list[str]:
    """Cells of the drawn pool, by block id."""
    cells: list[str] = []
    for line in picture.splitlines():
        match = re.match(r"block +(\d+) (?!to )(.*)", line)
        if match:
            assert int(match[1]) == len(cells)
            body = match[2].ljust(3 * (-(-len(match[2]) // 3)))
            cells += [body[i : i + 2] for i in range(0, len(body), 3)]
    return cells


def test_each_block_is_lettered_by_its_owners() -> None:
    manager = BlockManager(8, 4, watermark=0.0, shuffle_seed=3)
    manager.allocate(10, list(range(1, 10)))
    manager.allocate(20, list(range(50, 55)))
    cells = pool_cells(draw_cache(manager.snapshot()).plain)
    expected = ["··"] * 8
    for letter, seq_id in (("A ", 10), ("B ", 20)):
        for block_id in manager.block_table(seq_id):
            expected[block_id] = letter
    assert cells == expected


def test_a_shared_block_names_both_owners_and_its_ref_count() -> None:
    manager = BlockManager(8, 4, watermark=0.0)
    manager.allocate(1, list(range(1, 7)))
    manager.fork(1, 2)
    picture = draw_cache(manager.snapshot(), {1: "first", 2: "second"}).plain
    cells = pool_cells(picture)
    for block_id in manager.block_table(1):
        assert cells[block_id] == "AB"
    assert "A = first: 6 tokens in 2 blocks" in picture
    assert "B = second: 6 tokens in 2 blocks" in picture
    assert picture.count("refs          2     2") == 2
    manager.fork(1, 3)
    assert pool_cells(draw_cache(manager.snapshot()).plain).count("A+") == 2


def test_the_last_blocks_fill_is_drawn() -> None:
    manager = BlockManager(8, 4, watermark=0.0)
    manager.allocate(1, list(range(1, 7)))
    assert "last block [####....] 2/4 tokens" in draw_cache(manager.snapshot()).plain
    manager.append(1, 2)
    assert "last block [########] 4/4 tokens" in draw_cache(manager.snapshot()).plain


def test_idle_cached_blocks_differ_from_free_ones() -> None:
    manager = BlockManager(6, 4, watermark=0.0)
    manager.allocate(1, list(range(1, 10)))
    manager.publish(1, [], 9)
    table = manager.block_table(1)
    manager.free(1)
    cells = pool_cells(draw_cache(manager.snapshot()).plain)
    assert [cells[block_id] for block_id in table] == ["c·", "c·", "··"]


def test_a_swapped_block_shows_its_place_on_the_cpu() -> None:
    manager = BlockManager(6, 4, num_cpu_blocks=6, watermark=0.0)
    manager.allocate(1, list(range(1, 10)))
    manager.swap_out([1])
    picture = draw_cache(manager.snapshot()).plain
    for entry in manager.block_table(1):
        assert f"cpu{-1 - entry}" in picture


def test_a_swapped_block_that_two_hold_has_two_references() -> None:
    manager = BlockManager(6, 4, num_cpu_blocks=6, watermark=0.0)
    manager.allocate(1, list(range(1, 7)))
    manager.fork(1, 2)
    manager.swap_out([1, 2])
    assert manager.block_table(1).tolist() == manager.block_table(2).tolist()
    assert all(entry < 0 for entry in manager.block_table(1))
    assert draw_cache(manager.snapshot()).plain.count("refs          2     2") == 2


def test_what_does_not_fit_is_counted_not_dropped() -> None:
    manager = BlockManager(100, 4, watermark=0.0)
    for seq_id in range(20):
        manager.allocate(seq_id, list(range(1, 18)))
    picture = draw_cache(manager.snapshot(), max_pool_rows=2, max_sequences=3).plain
    assert "... and 68 more blocks" in picture
    assert "... and 17 more sequences" in picture


def test_rows_that_are_free_together_take_one_line() -> None:
    manager = BlockManager(100, 4, watermark=0.0)
    manager.allocate(1, [5])
    picture = draw_cache(manager.snapshot()).plain
    assert "block   16 to 99: free" in picture
    assert len(pool_cells(picture)) == 16


def test_the_summary_equals_the_managers_statistics() -> None:
    manager = BlockManager(10, 4, watermark=0.0)
    manager.allocate(1, list(range(1, 7)))
    manager.fork(1, 2)
    picture = draw_cache(manager.snapshot()).plain
    assert "2 referenced (2 shared), 0 cached, 8 free: 20.0% occupied" in picture
    assert "tokens  6 of 40: 15.0% occupied" in picture


def test_an_empty_pool_is_drawn() -> None:
    assert pool_cells(draw_cache(BlockManager(3, 4).snapshot()).plain) == ["··"] * 3


@pytest.mark.parametrize("name", ["cells_per_row", "max_pool_rows", "max_sequences"])
def test_a_bound_below_one_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        draw_cache(BlockManager(2, 4).snapshot(), **{name: 0})


def test_the_example_shows_the_copy_on_write() -> None:
    before, after = copy_on_write_example()
    shared = before.snapshot.block_ids.tolist()
    assert shared[:2] == shared[2:], "both requests hold the same two blocks"
    assert [before.snapshot.ref_counts[b] for b in shared[:2]] == [2, 2]
    first, last, first_again, copied = after.snapshot.block_ids.tolist()
    assert first == first_again == shared[0]
    assert last == shared[1] != copied
    assert [after.snapshot.ref_counts[b] for b in (first, last, copied)] == [2, 1, 1]
    assert f"block {last} -> block {copied}" in after.title
    assert after.snapshot.statistics.num_copies == 1


def test_an_example_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks >= 3"):
        copy_on_write_example(num_blocks=2)


def test_what_was_given_back_behind_a_window_is_a_dot_without_holders() -> None:
    manager = BlockManager(8, 4, watermark=0.0, enable_prefix_caching=False)
    manager.allocate(1, list(range(1, 15)))
    manager.fork(1, 2)
    manager.free_behind(1, 9)
    picture = draw_cache(manager.snapshot()).plain
    assert "A = 1: 14 tokens in 2 blocks, 2 more given back behind its window" in picture
    assert "B = 2: 14 tokens in 4 blocks\n" in picture
    table = manager.block_table(2).tolist()
    shown = "".join(f"{cell:>6}" for cell in (".", ".", *table[2:]))
    assert f"  block    {shown}\n  refs          0     0     2     2\n" in picture
    assert [cell for cell in pool_cells(picture) if "A" in cell] == ["AB", "AB"]
