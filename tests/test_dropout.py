"""graphattn.dropout: the mask is Philox-4x32 of seed, edge, head and batch row."""

import pytest
import torch

from graphattn.dropout import draw_seed, drop, keep_mask


def philox(counter, key, rounds):
    """Philox-4x32 in Python's integers, from the paper's definition."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def words(text):
    return tuple(int(word, 16) for word in text.split())


@pytest.mark.parametrize(
    ("counter", "key", "rounds", "expected"),
    [
        ("0 0 0 0", "0 0", 10, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("0 0 0 0", "0 0", 7, "5f6fb709 0d893f64 4f121f81 4f730a48"),
        (
            "ffffffff ffffffff ffffffff ffffffff",
            "ffffffff ffffffff",
            10,
            "408f276d 41c83b0e a20bc7c6 6d5451fd",
        ),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            10,
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_the_generator_of_this_test_gives_the_known_answers(counter, key, rounds, expected):
    assert philox(words(counter), words(key), rounds) == words(expected)


def threshold_of(seed, edge, head, row):
    """The smallest threshold at which this weight is dropped, found through keep_mask alone."""
    low, high = 0, 2**32  # kept at low, dropped at high
    while high - low > 1:
        middle = (low + high) // 2
        kept = keep_mask(seed, edge, head + 1, middle / 2**32, batch=row + 1)[0, row, head]
        low, high = (middle, high) if kept else (low, middle)
    return low


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 0x299F31D0A4093822])
@pytest.mark.parametrize("edge", [0, 5, 2**32 + 7])
def test_bits_are_those_of_seven_rounds(seed, edge):
    for head, row in ((0, 0), (3, 0), (6, 2)):
        key = (seed % 2**32, (seed >> 32) % 2**32)
        counter = (edge % 2**32, edge >> 32, head // 4, row)
        expected = philox(counter, key, 7)[head % 4]
        assert threshold_of(torch.tensor(seed), torch.tensor([edge]), head, row) == expected


def test_all_zero_counter_and_key_give_the_known_answer():
    bits = [threshold_of(torch.tensor(0), torch.tensor([0]), head, 0) for head in range(4)]
    assert tuple(bits) == words("5f6fb709 0d893f64 4f121f81 4f730a48")


def test_the_mask_is_a_function_of_edge_head_and_row_only():
    seed = torch.tensor(1234567)
    edge_id = torch.arange(100)
    whole = keep_mask(seed, edge_id, 8, 0.5, batch=3)
    assert whole.shape == (100, 3, 8)
    assert whole.dtype == torch.bool
    order = torch.randperm(100)
    assert torch.equal(keep_mask(seed, order, 8, 0.5, batch=3), whole[order])
    assert torch.equal(keep_mask(seed, edge_id, 3, 0.5), whole[:, :1, :3])
    assert torch.equal(keep_mask(seed, edge_id[40:], 8, 0.5, batch=2), whole[40:, :2])
    assert keep_mask(seed, edge_id[:0], 8, 0.5).shape == (0, 1, 8)
    assert keep_mask(seed, edge_id, 8, 0.5, batch=0).shape == (100, 0, 8)


@pytest.mark.parametrize("dropout", [0.1, 0.5, 0.9])
def test_share_of_weights_kept_and_independence(dropout):
    keep = keep_mask(torch.tensor(99), torch.arange(20_000), 4, dropout, batch=2).double()
    spread = (dropout * (1 - dropout) / 20_000) ** 0.5
    assert ((keep.mean(0) - (1 - dropout)).abs() < 5 * spread).all()
    columns = keep.flatten(1)
    correlation = torch.corrcoef(columns.t()) - torch.eye(8, dtype=torch.float64)
    assert correlation.abs().max() < 5 / 20_000**0.5
    next_edge = torch.corrcoef(torch.stack([columns[:-1, 0], columns[1:, 0]]))[0, 1]
    assert next_edge.abs() < 5 / 20_000**0.5


def test_dropout_0_keeps_all_and_1_none():
    seed, edge_id = torch.tensor(3), torch.arange(1000)
    assert keep_mask(seed, edge_id, 4, 0.0).all()
    assert not keep_mask(seed, edge_id, 4, 1.0).any()


def test_drop_scales_what_it_keeps():
    weight = torch.rand(50, 2, 3) + 0.1
    seed, edge_id = torch.tensor(5), torch.randperm(50)
    dropped = drop(weight, seed, edge_id, 0.25)
    keep = keep_mask(seed, edge_id, 3, 0.25, batch=2)
    torch.testing.assert_close(dropped, torch.where(keep, weight / 0.75, 0.0))
    in_order = drop(weight, seed, torch.arange(50), 0.25)
    assert torch.equal(drop(weight, seed, None, 0.25), in_order)
    assert drop(weight, seed, None, 1.0).eq(0).all()


def test_seeds_follow_manual_seed():
    torch.manual_seed(1)
    first = [draw_seed() for _ in range(3)]
    torch.manual_seed(1)
    assert first == [draw_seed() for _ in range(3)]
    assert len({int(seed) for seed in first}) == 3
    assert first[0].shape == ()
    assert first[0].dtype == torch.int64
    seeds = torch.stack([draw_seed() for _ in range(200)])
    assert (seeds < 0).any()
    assert (seeds > 0).any()


def test_mask_of_many_edges_is_that_of_each():
    seed, count = torch.tensor(3), 100_000  # drawn in several slices
    edge_id = torch.arange(count)
    mask = keep_mask(seed, edge_id, 6, 0.4, batch=2)
    some = torch.tensor([0, 1, 21_844, 21_845, 50_000, count - 1])
    assert torch.equal(mask[some], keep_mask(seed, some, 6, 0.4, batch=2))
