import torch
import torch.nn.functional as F

from debias_diffusion import load_encoder
from debias_diffusion.encoders.text_forward import encode_text
from debias_diffusion.encoders.tokens import collate_tokens
from debias_diffusion.training.dry_run import KeptForBackward, dry_run_report, render_tokens
from debias_diffusion.training.losses import contrastive_loss

CAPTIONS = ["A red star. A blue ring.", "word " * 300]


def batch_of(encoder, prefixes):
    rows = [encoder.tokenizer.encode(caption) for caption in CAPTIONS]
    return collate_tokens(rows, prefixes, encoder.context_length, encoder.tokenizer.layout)


def test_padding_is_marked_where_it_is_and_rows_add_up(tiny):
    long, ids = tiny.stretched(248), tiny.tokenizer.encode("A red star.")
    batch = collate_tokens([ids], [37], 248)
    rendered = render_tokens(batch.input_ids[0].tolist(), 37, long.tokenizer)
    assert rendered.startswith("[start] [pad x 37] a red star . [end] [pad x ")
    assert int(rendered.rsplit(" ", 1)[1].rstrip("]")) + 37 + len(ids) == 248


def test_siglip_rows_show_padding_at_the_very_front():
    encoder = load_encoder("miniature-siglip:random")
    batch = batch_of(encoder, [9, 0])
    rendered = [
        render_tokens(row.tolist(), int(n), encoder.tokenizer) for row, n in zip(batch.input_ids, batch.num_prefix)
    ]
    assert rendered[0].startswith("[pad x 9] a red star a blue ring [end] [pad x ")
    assert "[pad" not in rendered[1]
    assert rendered[1].endswith("[end]")


def test_kept_bytes_count_storages_once_and_no_weights():
    layer = torch.nn.Linear(100, 50, bias=False)
    x = torch.randn(8, 100)
    with KeptForBackward(layer) as kept:
        y = layer(x)
        z = y.tanh() + y.tanh() + layer(x.view(4, 2, 100)).view(8, 50)
    # The input once, though two views of it are kept; what the two tanh gave; and nothing of the weight.
    assert kept.bytes == 4 * (8 * 100 + 2 * 8 * 50)
    z.sum().backward()
    assert layer.weight.grad is not None


def test_the_report_tells_all_there_is_to_know_and_changes_nothing(tiny):
    encoder = tiny.stretched(248)
    clip = encoder.model
    clip.visual.requires_grad_(False)
    full, augmented = batch_of(encoder, [0, 0]), batch_of(encoder, [30, 0])
    before = {k: v.clone() for k, v in clip.state_dict().items()}

    def first_loss():
        text = F.normalize(encode_text(clip.text, full.input_ids, full.num_prefix), dim=-1)
        image = F.normalize(clip.visual(torch.zeros(2, 3, 32, 32)), dim=-1)
        return contrastive_loss(image, text, image, text, clip.logit_scale.exp())

    report = dry_run_report(
        clip, encoder.tokenizer, CAPTIONS, (full, augmented), first_loss, steps=14_598, processes=4, average=True
    )
    every = sum(p.numel() for p in clip.parameters())
    trained = every - sum(p.numel() for p in clip.visual.parameters())
    assert f"whole model  {every:>13,} parameters, {trained:>13,} of them trained" in report
    assert "batch        8 pairs in 4 processes; here 2 pictures and 4 rows of up to 248 of 248 tokens" in report
    assert "steps        14,598" in report
    assert f"weights {every * 4 / 2**20:.1f} MiB, gradients {trained * 4 / 2**20:.1f} MiB" in report
    assert f"optimizer {trained * 8 / 2**20:.1f} MiB, average {trained * 4 / 2**20:.1f} MiB" in report
    assert f"first loss   {first_loss().item():.4f}" in report
    assert "caption    A red star. A blue ring." in report
    assert "augmented  a red star . a blue ring ." in report
    assert "(cut at 248 tokens)" in report
    assert "tokens     [start] [pad x 30] a red star . a blue ring . [end] [pad x " in report
    assert all(torch.equal(v, before[k]) for k, v in clip.state_dict().items())
    assert all(p.grad is None for p in clip.parameters())
