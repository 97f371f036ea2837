"""Runs with what a user may choose beyond the recipe: another family, adapters, an average, rates and frozen layers."""

import dataclasses
import shutil

import pytest
import torch
from safetensors.torch import load_file

from debias_diffusion import load_encoder, text_features
from debias_diffusion.encoders.checkpoint import WEIGHTS_FILE
from debias_diffusion.training import run as run_module
from debias_diffusion.training.checkpoints import find_checkpoints
from debias_diffusion.training.loop import dry_run, read_metrics, train
from debias_diffusion.training.lora import has_lora

CAPTIONS = ["A small red star in the top left.", "A ring. A blue star. A large square below it."]


def weights(folder):
    return load_file(folder / WEIGHTS_FILE)


def resumed_after_two(config, tmp_path):
    """The same run stopped after its second step and taken up again, into another folder."""
    half = tmp_path / "half"
    shutil.copytree(tmp_path / "run", half)
    shutil.rmtree(find_checkpoints(half / "checkpoints")[-1])
    shutil.rmtree(half / "encoder")
    return train(dataclasses.replace(config, output=str(half), resume=True))


@pytest.fixture
def runs(monkeypatch):
    """The Run objects that `train` makes."""
    made = []

    class Watched(run_module.Run):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

        def go(self, stop):
            super().go(stop)
            if has_lora(self.encoder.model):
                self.unmerged = text_features(self.encoder, CAPTIONS)

    monkeypatch.setattr("debias_diffusion.training.loop.Run", Watched)
    return made


@pytest.mark.parametrize("change", [{}, {"chunk_size": 3}, {"train_towers": "text"}], ids=["whole", "chunks", "text"])
def test_siglip_trains_two_steps_and_is_saved_with_its_bias(config, change, tmp_path):
    change = {**change, "feature_cache": str(tmp_path / "features")}
    config = dataclasses.replace(config, encoder="miniature-siglip:random", max_steps=2, **change)
    again = load_encoder(train(config))
    torch.manual_seed(config.seed)
    base = load_encoder(config.encoder).stretched(248)
    metrics = read_metrics(tmp_path / "run")
    assert again.loss == "sigmoid"
    assert again.context_length == 248
    assert again.model.logit_bias.item() == pytest.approx(metrics[-1]["logit_bias"])
    assert metrics[-1]["logit_bias"] != -10
    # Scale 10 and bias -10, features all but alike: softplus(-(10 c - 10)) for the own caption, c near 1, and the others.
    assert 0 < metrics[0]["loss"] < 30
    assert not torch.equal(again.model.text.text_projection.weight, base.model.text.text_projection.weight)
    table, then = again.model.text.positional_embedding, base.model.text.positional_embedding
    assert torch.equal(table[:20], then[:20])
    assert not torch.equal(table[20:], then[20:])


def test_siglip_chunks_train_like_the_whole_batch_and_its_scale_has_no_limit(config, tmp_path, monkeypatch):
    config = dataclasses.replace(config, encoder="miniature-siglip:random", max_steps=3, max_logit_scale=2.0)
    train(config)
    train(dataclasses.replace(config, output=str(tmp_path / "chunked"), chunk_size=3))
    whole, chunked = (read_metrics(tmp_path / name) for name in ("run", "chunked"))
    assert [m["loss"] for m in whole] == pytest.approx([m["loss"] for m in chunked], abs=1e-4)
    assert whole[-1]["logit_scale"] == pytest.approx(10, abs=0.1)


def test_a_label_smoothing_has_no_place_in_the_sigmoid_loss(config, tmp_path):
    from debias_diffusion import save_encoder

    smooth = dataclasses.replace(config, label_smoothing=0.1)
    with pytest.raises(ValueError, match="this row has the sigmoid loss"):
        train(dataclasses.replace(smooth, encoder="miniature-siglip:random"))
    folder = save_encoder(load_encoder("miniature-siglip:random"), tmp_path / "siglip")
    with pytest.raises(ValueError, match=r"label-smoothing 0.1 is for the softmax loss, but .* has the sigmoid loss"):
        train(dataclasses.replace(smooth, encoder=str(folder)))


def test_a_lora_run_exports_what_it_computed_and_resumes(config, runs, tiny_folder, tmp_path):
    config = dataclasses.replace(config, lora_rank=4, lora_alpha=8, learning_rate=1e-2)
    folder = train(config)
    again = load_encoder(folder)
    torch.testing.assert_close(text_features(again, CAPTIONS), runs[0].unmerged, atol=1e-5, rtol=0)
    merged, base = weights(folder), weights(tiny_folder)
    assert merged.keys() == base.keys()
    assert not torch.equal(
        merged["text.transformer.resblocks.0.mlp.c_fc.weight"], base["text.transformer.resblocks.0.mlp.c_fc.weight"]
    )
    for name in ("text.token_embedding.weight", "text.ln_final.weight", "text.transformer.resblocks.0.mlp.c_fc.bias"):
        assert torch.equal(merged[name], base[name]), name
    assert not torch.equal(merged["visual.proj"], base["visual.proj"])
    resumed = weights(resumed_after_two(config, tmp_path))
    assert all(torch.equal(merged[name], resumed[name]) for name in merged)


def test_a_run_with_an_average_exports_it_and_resumes(config, tmp_path, monkeypatch):
    from debias_diffusion.training.ema import WeightAverage

    seen, update = [], WeightAverage.update

    def watched(self, model):
        seen.append({n: p.detach().clone() for n, p in model.named_parameters()})
        update(self, model)

    monkeypatch.setattr(WeightAverage, "update", watched)
    config = dataclasses.replace(config, ema_decay=0.5)
    averaged = weights(train(config))
    assert len(seen) == 4
    torch.manual_seed(config.seed)
    wanted = load_encoder(config.encoder).model.visual.proj.detach()
    for step, state in enumerate(seen, start=1):
        decay = min(0.5, (1 + step) / (10 + step))
        wanted = decay * wanted + (1 - decay) * state["visual.proj"]
    torch.testing.assert_close(averaged["visual.proj"], wanted)
    assert not torch.equal(averaged["visual.proj"], seen[-1]["visual.proj"])
    plain = weights(train(dataclasses.replace(config, ema_decay=0.0, output=str(tmp_path / "plain"))))
    assert torch.equal(plain["visual.proj"], seen[-1]["visual.proj"])
    resumed = weights(resumed_after_two(config, tmp_path))
    assert all(torch.equal(averaged[name], resumed[name]) for name in averaged)


def test_a_checkpoint_without_its_average_is_refused(config, tmp_path):
    train(dataclasses.replace(config, ema_decay=0.5))
    (find_checkpoints(tmp_path / "run" / "checkpoints")[-1] / "average.safetensors").unlink()
    with pytest.raises(ValueError, match=r"step-00000004 cannot be read \(.*average.safetensors"):
        train(dataclasses.replace(config, ema_decay=0.5, resume=True))


def test_towers_have_learning_rates_of_their_own(config, tmp_path):
    """A step of Adam from rest is the learning rate in every weight, whatever the gradient."""
    config = dataclasses.replace(config, max_steps=1, warmup_steps=1, weight_decay=0.0, learning_rate=1e-3)
    rates = {"text_learning_rate": 4e-3, "image_learning_rate": 2e-3}
    trained, base = weights(train(dataclasses.replace(config, **rates))), weights(tmp_path.__class__(config.encoder))
    for name, rate in (("text.ln_final.bias", 4e-3), ("visual.ln_post.bias", 2e-3), ("logit_scale", 1e-3)):
        moved = (trained[name] - base[name]).abs()
        assert float(moved.max()) == pytest.approx(rate, rel=1e-3), name
    last = read_metrics(tmp_path / "run")[-1]
    assert [last[k] for k in ("learning_rate", *rates)] == pytest.approx([1e-3, 4e-3, 2e-3])


def test_without_rates_of_their_own_there_is_one_group_as_published(config, runs, tmp_path):
    train(dataclasses.replace(config, max_steps=1, text_learning_rate=1e-3))
    assert [group["name"] for group in runs[0].optimizer.param_groups] == ["all"]


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_frozen_text_layers_keep_every_bit(config, lora_rank, tiny_folder):
    frozen = ("text.token_embedding.weight", "text.transformer.resblocks.0.")
    trained = weights(train(dataclasses.replace(config, frozen_text_layers=1, lora_rank=lora_rank)))
    base = weights(tiny_folder)
    for name in (n for n in base if n.startswith(frozen)):
        assert torch.equal(trained[name], base[name]), name
    moved = "text.transformer.resblocks.1.mlp.c_fc.weight"
    assert not torch.equal(trained[moved], base[moved])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_learning_rate": 2.0}, "must be 0 .* to 1"),
        ({"image_learning_rate": -1.0}, "must be 0 .* to 1"),
        ({"frozen_text_layers": 3}, "frozen-text-layers is 3; this text tower has 2 layers"),
        ({"lora_rank": -1}, "must not be negative"),
        ({"lora_alpha": 4}, "lora-alpha without --lora-rank"),
        ({"lora_rank": 4, "train_towers": "image"}, "lora-rank adapts the text tower"),
        ({"ema_decay": 1.0}, "ema-decay is 1.0; expected 0"),
        ({"tokenizer": "nowhere"}, "tokenizer 'nowhere' is no folder"),
        ({"keep_positions": 19, "stretch": "ratio"}, "cannot be stretched to 248"),
    ],
)
def test_impossible_choices_are_one_clear_line(config, change, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        train(dataclasses.replace(config, **change))
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_without_peft_one_line_says_what_to_install(config, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ValueError, match="LoRA needs peft, which is not installed: pip install"):
        train(dataclasses.replace(config, lora_rank=2))


@pytest.mark.parametrize(
    "change", [{}, {"chunk_size": 3}, {"train_towers": "text"}, {"ema_decay": 0.9, "lora_rank": 2}]
)
def test_a_dry_run_tells_what_the_run_would_do_and_writes_nothing(config, change, tmp_path):
    config = dataclasses.replace(config, max_steps=0, epochs=3, **change, feature_cache=str(tmp_path / "features"))
    report = dry_run(config)
    assert "steps 0 to 6" in report
    assert "steps        6\n" in report
    assert "batch        8 pairs in 1 process; here 8 pictures and 16 rows" in report
    assert "augmented  " in report
    assert "tokens     [start]" in report
    assert not list(tmp_path.iterdir())
    shown = float(report.split("first loss   ")[1].split()[0])
    train(dataclasses.replace(config, max_steps=1))
    assert shown == pytest.approx(read_metrics(tmp_path / "run")[0]["loss"], abs=1e-4)
