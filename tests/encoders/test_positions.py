import pytest
import torch

from debias_diffusion.encoders.positions import (
    freeze_first_positions,
    fuse_tables,
    stretch_positions,
    stretch_ratio,
    thaw_positions,
)


def test_a_small_table_by_hand():
    table = torch.tensor([[0.0], [10.0], [20.0], [40.0]])
    stretched = stretch_positions(table, ratio=2, keep=1)
    assert stretched.flatten().tolist() == [0.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0]


def test_the_published_table(shared):
    import numpy as np

    golden = np.load(shared / "vectors" / "longclip_tiny.npz")
    stretched = stretch_positions(torch.from_numpy(golden["positions_77"]))
    torch.testing.assert_close(stretched, torch.from_numpy(golden["positions_248"]), atol=1e-7, rtol=0)


def test_first_rows_are_the_same_bits_and_half_precision_is_stretched_in_float32():
    table = torch.randn(77, 8).half()
    stretched = stretch_positions(table)
    assert stretched.dtype == torch.float16
    assert torch.equal(stretched[:20], table[:20])
    assert torch.equal(stretched, stretch_positions(table.float()).half())


@pytest.mark.parametrize(("length", "target", "ratio"), [(77, 248, 4), (64, 196, 4), (77, 77, 1)])
def test_reachable_lengths(length, target, ratio):
    assert stretch_ratio(length, target) == ratio


def test_an_unreachable_length_lists_those_it_can_reach():
    with pytest.raises(ValueError, match=r"stretched to 250; .*77, 134, 191, 248"):
        stretch_ratio(77, 250)


def test_fused_tables_take_each_row_from_where_it_was_trained():
    base, trained = torch.zeros(30, 2), torch.ones(30, 2)
    assert fuse_tables(base, trained)[:, 0].tolist() == [0.0] * 20 + [1.0] * 10
    with pytest.raises(ValueError, match="differ in shape"):
        fuse_tables(base, trained[:5])


def test_features_of_short_captions_survive_stretching(tiny):
    from debias_diffusion import text_features

    captions = ["A large red circle.", "Two stars and a ring."]
    torch.testing.assert_close(text_features(tiny.stretched(248), captions), text_features(tiny, captions))


def test_frozen_rows_outlive_decay_and_momentum(tiny):
    text = tiny.stretched(248).model.text
    before = text.positional_embedding.detach().clone()
    freeze_first_positions(text)
    optimizer = torch.optim.AdamW(text.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(3):
        ids = torch.randint(1, 800, (4, 248))
        ids[:, 60] = 850
        text(ids).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    thaw_positions(text)
    after = text.positional_embedding
    assert torch.equal(after[:20], before[:20])
    assert (after[20:] - before[20:]).abs().min() > 0  # rows never read still decay, as all other weights do
    assert isinstance(after, torch.nn.Parameter)
    assert not any("parametrizations" in name for name in text.state_dict())
