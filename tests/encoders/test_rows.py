"""Every row at its real config, on the meta device; and every other open_clip model, taken or refused with a reason."""

import json

import open_clip
import pytest
import torch
from open_clip.model import CustomTextCLIP, _build_text_tower

from debias_diffusion import load_encoder
from debias_diffusion.encoders.encoder import spec_config
from debias_diffusion.encoders.positions import natural_rule, stretch_text_tower
from debias_diffusion.encoders.rows import named_source, other_spec, why_not_stretched
from debias_diffusion.encoders.specs import KEEP, SPECS, find_spec
from debias_diffusion.encoders.text_forward import encode_text


@pytest.mark.parametrize("name", list(SPECS))
def test_every_row_is_what_its_facts_say_and_stretches(name):
    spec, config = find_spec(name), spec_config(find_spec(name))
    with torch.device("meta"):
        model = CustomTextCLIP(**{k: v for k, v in config.items() if k != "custom_text"})
    text, family = model.text, spec.family
    assert (text.attn_mask is not None) == family.causal
    assert text.pool_type == {"eot": "argmax", "last": "last"}[family.pooling]
    assert (model.logit_bias is not None) == (family.loss == "sigmoid")
    assert len(text.positional_embedding) == family.context_length == spec.context_length
    assert natural_rule(text) == family.stretch
    assert bool(spec.tokenizer) == (bool(config["text_cfg"].get("hf_tokenizer_name")) and spec.config is None)
    assert spec.tokenizer in ("", config["text_cfg"].get("hf_tokenizer_name"))
    stretch_text_tower(text, family.stretched_length)
    assert text.positional_embedding.shape == (family.stretched_length, text.width)
    assert text.context_length == family.stretched_length
    if family.causal:
        assert text.attn_mask.shape == (248, 248)


@pytest.mark.parametrize("name", [n for n, s in SPECS.items() if s.family.causal])
def test_short_captions_keep_their_features_in_every_causal_tower(name):
    """Real widths and vocabularies; of the layers the first alone, which is as long as the whole tower."""
    config = spec_config(find_spec(name))
    torch.manual_seed(0)
    text = _build_text_tower(config["embed_dim"], {**config["text_cfg"], "layers": 1}, config["quick_gelu"]).eval()
    eot = config["text_cfg"]["vocab_size"] - 1
    ids = torch.zeros(3, 20, dtype=torch.long)
    for row, length in zip(ids, (3, 12, 20), strict=True):
        row[:length] = torch.randint(1, eot - 1, (length,))
        row[0], row[length - 1] = eot - 1, eot
    with torch.no_grad():
        before = encode_text(text, ids)
        stretch_text_tower(text, 248)
        torch.testing.assert_close(encode_text(text, ids), before)
        ids = torch.cat([ids[2:, :19], torch.randint(1, eot - 1, (1, 40)), ids[2:, 19:]], 1)
        long = encode_text(text, ids)
    assert (long - before[2]).abs().max() > 1e-3  # what lies beyond the rows that stay does change


def test_the_table_s_lengths_of_both_siglip_rules():
    with torch.device("meta"):
        text = _build_text_tower(64, spec_config(find_spec("SigLIP-B-16"))["text_cfg"])
    stretch_text_tower(text, 196, rule="ratio")
    assert len(text.positional_embedding) == 196
    with pytest.raises(ValueError, match=r"64 rows .* cannot be stretched to 248"), torch.device("meta"):
        stretch_text_tower(_build_text_tower(64, spec_config(find_spec("SigLIP-B-16"))["text_cfg"]), 248, rule="ratio")


def _texts() -> dict[str, str]:
    """One model for each distinct text tower that open_clip knows."""
    distinct = {
        json.dumps(open_clip.get_model_config(n)["text_cfg"], sort_keys=True): n for n in open_clip.list_models()
    }
    return {name: config for config, name in distinct.items()}


@pytest.mark.parametrize("name", sorted(_texts()))
def test_any_other_open_clip_model_stretches_or_says_why_not(name):
    config = open_clip.get_model_config(name)
    if reason := why_not_stretched(config):
        with pytest.raises(ValueError, match=f"{name} cannot be trained or stretched here: "):
            other_spec(name)
        assert "\n" not in reason
        return
    spec = other_spec(name)
    with torch.device("meta"):
        text = _build_text_tower(config["embed_dim"], config["text_cfg"], spec.quick_gelu)
    assert (text.attn_mask is not None) == spec.family.causal
    length = KEEP + 4 * (spec.context_length - KEEP)
    stretch_text_tower(text, length)
    assert len(text.positional_embedding) == length


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("roberta-ViT-B-32", "transformers' roberta-base"),
        ("coca_ViT-B-32", "class token"),
        ("ViT-H-14-CLIPA", "drops the end token"),
        ("ViT-SO400M-14-SigLIP", "it has 16 positions, and the first 20 would stay"),
    ],
)
def test_refusals_name_their_reason(name, reason):
    with pytest.raises(ValueError, match=reason):
        load_encoder(f"{name}:random")


def test_an_open_clip_model_without_a_row_loads_by_its_name():
    encoder = load_encoder("ViT-S-32-alt:random")
    assert encoder.stretched(248).context_length == 248
    assert encoder.loss == "softmax"
    assert named_source("no/such:thing") is None
    assert named_source("ViT-B-16:openai") == (find_spec("ViT-B-16"), "openai")


def test_siglip_s_pictures_are_prepared_as_siglip_expects():
    from debias_diffusion.encoders.rows import _preprocess

    assert _preprocess(find_spec("SigLIP2-B-16"), "webli") == {
        "mean": (0.5, 0.5, 0.5),
        "std": (0.5, 0.5, 0.5),
        "interpolation": "bicubic",
        "resize_mode": "squash",
    }
