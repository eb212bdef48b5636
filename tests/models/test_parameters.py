"""How checkpoint tensors are divided among ranks, and put together in one parameter."""

from __future__ import annotations

import pytest
import torch

from pagedkv.models.parameters import Parameters, Piece, Split, fused


def shares(piece: Piece, num_ranks: int) -> list[tuple[int, int]]:
    return [piece.share(rank, num_ranks)[1:] for rank in range(num_ranks)]


@pytest.mark.parametrize("split", [Split.COLUMN, Split.ROW, Split.KV_HEADS, Split.VOCABULARY])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_shares_cover_the_tensor_once(split: Split, num_ranks: int) -> None:
    piece = Piece("w", (32, 32), split, unit=8)
    assert piece.share(0, num_ranks)[0] == (1 if split is Split.ROW else 0)
    covered = [i for start, stop in shares(piece, num_ranks) for i in range(start, stop)]
    assert covered == list(range(32))


def test_a_head_is_never_cut() -> None:
    with pytest.raises(ValueError, match="q: 3 units of 8 cannot be divided among 2 ranks"):
        Piece("q", (24, 4), Split.COLUMN, unit=8).share(0, 2)


def test_more_ranks_than_kv_heads_share_them() -> None:
    piece = Piece("k", (16, 4), Split.KV_HEADS, unit=8)
    assert shares(piece, 4) == [(0, 8), (0, 8), (8, 16), (8, 16)]
    with pytest.raises(ValueError, match="k: 2 units of 8 cannot be divided among 3 ranks"):
        piece.share(0, 3)


def test_a_vocabulary_need_not_be_divisible() -> None:
    assert shares(Piece("e", (10, 4), Split.VOCABULARY), 4) == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert shares(Piece("e", (4, 4), Split.VOCABULARY), 3) == [(0, 2), (2, 4), (4, 4)]


def query_and_key(rank: int, num_ranks: int) -> tuple[Parameters, torch.Tensor]:
    """Q of two heads and K of one below each other, loaded in the wrong order."""
    parameters = Parameters(
        dtype=torch.float32, device=torch.device("cpu"), rank=rank, num_ranks=num_ranks
    )
    parameter = parameters.add(
        Piece("q", (8, 3), Split.COLUMN, unit=4), Piece("k", (4, 3), Split.KV_HEADS, unit=4)
    )
    k, q = torch.arange(12.0).view(4, 3) + 100, torch.arange(24.0).view(8, 3)
    for name, tensor in (("k", k), ("q", q)):
        found = parameters.find(name)
        assert found is parameter
        found.load(name, tensor.double())
    assert parameters.missing == []
    return parameters, parameter.data


def test_pieces_lie_below_each_other_whatever_their_order() -> None:
    _, whole = query_and_key(0, 1)
    assert whole.dtype == torch.float32
    assert whole[:, 0].tolist() == [0, 3, 6, 9, 12, 15, 18, 21, 100, 103, 106, 109]


def test_each_rank_holds_its_heads_and_the_shared_kv_head() -> None:
    assert query_and_key(0, 2)[1][:, 0].tolist() == [0, 3, 6, 9, 100, 103, 106, 109]
    assert query_and_key(1, 2)[1][:, 0].tolist() == [12, 15, 18, 21, 100, 103, 106, 109]


def test_a_row_split_holds_columns() -> None:
    parameters = Parameters(dtype=torch.float32, device=torch.device("cpu"), rank=1, num_ranks=2)
    parameter = parameters.add(Piece("o", (2, 4), Split.ROW, unit=2))
    parameter.load("o", torch.arange(8).view(2, 4).float())
    assert parameter.data.tolist() == [[2, 3], [6, 7]]


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(3, 2), r"w is \[3, 2\], expected \[2, 3\]"),
        (torch.zeros(6), r"w is \[6\], expected \[2, 3\]"),
        (torch.zeros(2, 3, dtype=torch.int8), "w is of torch.int8, expected 16 to 64-bit floats"),
        (torch.zeros(2, 3).to(torch.float8_e4m3fn), "w is of torch.float8_e4m3fn"),
    ],
)
def test_an_unfit_tensor_is_refused_and_nothing_is_allocated(
    tensor: torch.Tensor, message: str
) -> None:
    parameters = Parameters(dtype=torch.float32, device=torch.device("cpu"), rank=0, num_ranks=1)
    parameter = parameters.add(Piece("w", (2, 3)))
    with pytest.raises(ValueError, match=message):
        parameter.load("w", tensor)
    assert parameter.missing == {"w"}
    assert parameter._data is None


def test_a_tensor_that_comes_twice_is_refused() -> None:
    parameters = Parameters(dtype=torch.float32, device=torch.device("cpu"), rank=0, num_ranks=1)
    parameter = parameters.add(Piece("w", (2,)))
    parameter.load("w", torch.zeros(2))
    with pytest.raises(ValueError, match="w appears twice"):
        parameter.load("w", torch.ones(2))
    assert parameter.data.tolist() == [0, 0]


@pytest.mark.parametrize("transposed", [False, True])
def test_pieces_of_one_checkpoint_tensor_are_divided_each_by_itself(transposed: bool) -> None:
    """Rows 0 to 7 are queries, 8 to 11 keys: rank 1 of 2 holds rows 4 to 7 and 10 to 11."""
    pieces = fused(
        (
            Piece("q", (8, 3), Split.COLUMN, unit=2, transposed=transposed),
            Piece("k", (4, 3), Split.KV_HEADS, unit=2, transposed=transposed),
        ),
        "qk",
    )
    parameters = Parameters(dtype=torch.float32, device=torch.device("cpu"), rank=1, num_ranks=2)
    parameter = parameters.add(*pieces)
    assert parameters.missing == ["qk"]
    stored = torch.arange(36.0).view(12, 3)
    parameter.load("qk", stored.T if transposed else stored)
    assert parameters.missing == []
    assert torch.equal(parameter.data, stored[[4, 5, 6, 7, 10, 11]])
    with pytest.raises(ValueError, match="qk appears twice"):
        parameter.load("qk", stored.T if transposed else stored)
