"""SDXL in the two layouts it is handed around in, with its own file and key names, blocks and depths, but tiny widths."""

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
from safetensors.torch import save_file
from torch import Tensor, nn

from debias_diffusion.encoders.encoder import Encoder, build
from debias_diffusion.sdxl.slots import SLOTS, Slot, slot_from_encoder, text_tower, tower_state, vocabulary

WIDTHS = {"text_encoder": 32, "text_encoder_2": 64}  # different, as SDXL's are: diffusers tells a file's towers so
_LAYERS = {"text_encoder": 2, "text_encoder_2": 11}  # diffusers knows SDXL by a tenth layer of the second
_STEM = {"unet": "diffusion_pytorch_model", "vae": "diffusion_pytorch_model"} | dict.fromkeys(WIDTHS, "model")


@dataclass(frozen=True)
class Parts:
    """Random models of SDXL's classes, all weights such that half precision holds them."""

    towers: dict[str, Encoder]
    slots: dict[str, Slot]
    unet: Any
    vae: Any

    def pipeline(self) -> StableDiffusionXLPipeline:
        """The stock pipeline of these parts in memory."""
        first, second = self.slots.values()
        pipe = StableDiffusionXLPipeline(
            self.vae, first.model, second.model, first.tokenizer, second.tokenizer, self.unet, _scheduler(),
            add_watermarker=False,
        )  # fmt: skip
        pipe.set_progress_bar_config(disable=True)
        return pipe


def make_parts() -> Parts:
    """The same weights each time."""
    torch.manual_seed(0)
    towers = {slot: _tower(slot) for slot in WIDTHS}
    unet = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64, 64),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=2,
        transformer_layers_per_block=(1, 2, 10),
        attention_head_dim=(1, 2, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + WIDTHS["text_encoder_2"],
        cross_attention_dim=sum(WIDTHS.values()),
    )
    vae = AutoencoderKL(
        block_out_channels=(32, 32, 64, 64),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
        sample_size=64,
        scaling_factor=0.13025,
    )
    for model in (unet, vae):
        _settle(model)
    return Parts(towers, {slot: slot_from_encoder(tower, slot) for slot, tower in towers.items()}, unet, vae)


def _tower(slot: str) -> Encoder:
    width = WIDTHS[slot]
    config = {
        "embed_dim": width,
        "quick_gelu": slot == "text_encoder",
        "vision_cfg": {"image_size": 16, "patch_size": 8, "width": 32, "layers": 1, "head_width": 16},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": width, "heads": 4, "layers": _LAYERS[slot]},
    }
    encoder = build(f"tiny-{slot}", config, history={"base": "miniature:random"})
    _settle(encoder.model)
    return encoder


def _settle(model: nn.Module) -> None:
    """Moves norms off one and biases off zero, so that a swapped or dropped one shows, and rounds all to half."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter + 0.05 * torch.randn_like(parameter)).half().float())


def _scheduler() -> Any:
    return EulerDiscreteScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        timestep_spacing="leading",
        steps_offset=1,
        use_karras_sigmas=False,
    )


# A folder


def write_folder(parts: Parts, root: Path, variants: tuple[str | None, ...] = (None,)) -> Path:
    """model_index.json and a folder for each component, weights once in each variant (fp16 in half precision).

    Tokenizers are vocab.json and merges.txt, and the text encoders' configs have the older end-of-text id, as SDXL's.
    """
    index: dict[str, Any] = {"_class_name": "StableDiffusionXLPipeline", "_diffusers_version": "0.19.0.dev0"}
    index |= {"force_zeros_for_empty_prompt": True, "scheduler": ["diffusers", "EulerDiscreteScheduler"]}
    index |= {"unet": ["diffusers", "UNet2DConditionModel"], "vae": ["diffusers", "AutoencoderKL"]}
    for slot, spec in SLOTS.items():
        index |= {slot: ["transformers", spec.model_class.__name__], spec.tokenizer: ["transformers", "CLIPTokenizer"]}
        _write_text(parts, slot, root, variants)
    for name, model in (("unet", parts.unet), ("vae", parts.vae)):
        for variant in variants:
            own = copy.deepcopy(model).half() if variant == "fp16" else model
            own.save_pretrained(root / name, variant=variant)
    _scheduler().save_pretrained(root / "scheduler")
    _write_json(root / "model_index.json", index)
    return root


def write_config(parts: Parts, root: Path) -> Path:
    """The same folder without weights."""
    write_folder(parts, root)
    for path in root.rglob("*.safetensors"):
        path.unlink()
    return root


def weights_file(name: str, variant: str | None) -> str:
    """Path of a model's weights in a folder."""
    return f"{name}/{_STEM[name]}.{variant}.safetensors" if variant else f"{name}/{_STEM[name]}.safetensors"


def _write_text(parts: Parts, slot: str, root: Path, variants: tuple[str | None, ...]) -> None:
    spec, model, tower = SLOTS[slot], parts.slots[slot].model, parts.towers[slot]
    (root / slot).mkdir(parents=True, exist_ok=True)
    config = {k: v for k, v in model.config.to_dict().items() if k != "transformers_version"}
    _write_json(root / slot / "config.json", config | {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1})
    state = tower_state(text_tower(tower))
    if not spec.projects:
        del state["text_projection.weight"]
    state["text_model.embeddings.position_ids"] = torch.arange(77)[None]
    for variant in variants:
        cast = {k: v.half() if variant == "fp16" and v.is_floating_point() else v for k, v in state.items()}
        save_file(cast, root / weights_file(slot, variant), metadata={"format": "pt"})
    vocab, merges = vocabulary(None)
    _write_json(root / spec.tokenizer / "vocab.json", dict(vocab))
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges), ""]
    (root / spec.tokenizer / "merges.txt").write_text("\n".join(lines))
    special = {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
    special["pad_token"] = spec.pad_token
    _write_json(root / spec.tokenizer / "special_tokens_map.json", special)
    more = {"tokenizer_class": "CLIPTokenizer", "model_max_length": 77, "do_lower_case": True, "errors": "replace"}
    _write_json(root / spec.tokenizer / "tokenizer_config.json", special | more)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2))


# A single file


def write_file(parts: Parts, path: Path) -> Path:
    """All weights in one file in half precision, under the names SDXL was published with."""
    state = {f"model.diffusion_model.{k}": v for k, v in _unet_keys(parts.unet).items()}
    state |= {f"first_stage_model.{k}": v for k, v in _vae_keys(parts.vae).items()}
    first = tower_state(text_tower(parts.towers["text_encoder"]))
    del first["text_projection.weight"]
    first["text_model.embeddings.position_ids"] = torch.arange(77)[None]
    state |= {f"conditioner.embedders.0.transformer.{k}": v for k, v in first.items()}
    second = text_tower(parts.towers["text_encoder_2"]).state_dict()
    state |= {f"conditioner.embedders.1.model.{k}": v for k, v in second.items()}
    state["conditioner.embedders.1.model.logit_scale"] = torch.tensor(4.6)
    path.parent.mkdir(parents=True, exist_ok=True)
    halves = {k: v.detach().half() if v.is_floating_point() else v for k, v in state.items()}
    save_file({k: v.contiguous().clone() for k, v in halves.items()}, path, metadata={"format": "pt"})
    return path


_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_UNET_ENDS = {
    "conv_in": "input_blocks.0.0",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
_VAE_ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}


def _unet_keys(unet: Any) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for own, name in _UNET_ENDS.items():
        state |= _moved(unet.get_submodule(own), name)
    count = 1
    for block in unet.down_blocks:
        for i, resnet in enumerate(block.resnets):
            state |= _moved(resnet, f"input_blocks.{count}.0", _RESNET)
            if hasattr(block, "attentions"):
                state |= _moved(block.attentions[i], f"input_blocks.{count}.1")
            count += 1
        if block.downsamplers is not None:
            state |= _moved(block.downsamplers[0].conv, f"input_blocks.{count}.0.op")
            count += 1
    middle = unet.mid_block
    for i, part in enumerate((middle.resnets[0], middle.attentions[0], middle.resnets[1])):
        state |= _moved(part, f"middle_block.{i}", _RESNET if i != 1 else {})
    count = 0
    for block in unet.up_blocks:
        attends = hasattr(block, "attentions")
        for i, resnet in enumerate(block.resnets):
            state |= _moved(resnet, f"output_blocks.{count}.0", _RESNET)
            if attends:
                state |= _moved(block.attentions[i], f"output_blocks.{count}.1")
            count += 1
        if block.upsamplers is not None:
            state |= _moved(block.upsamplers[0].conv, f"output_blocks.{count - 1}.{1 + attends}.conv")
    return state


def _vae_keys(vae: Any) -> dict[str, Tensor]:
    state = _moved(vae.quant_conv, "quant_conv") | _moved(vae.post_quant_conv, "post_quant_conv")
    last = len(vae.config.block_out_channels) - 1
    for side, blocks, way in (("encoder", vae.encoder.down_blocks, "down"), ("decoder", vae.decoder.up_blocks, "up")):
        half = getattr(vae, side)
        for own, name in (("conv_in", "conv_in"), ("conv_norm_out", "norm_out"), ("conv_out", "conv_out")):
            state |= _moved(getattr(half, own), f"{side}.{name}")
        for i, resnet in enumerate(half.mid_block.resnets, 1):
            state |= _moved(resnet, f"{side}.mid.block_{i}", {"conv_shortcut": "nin_shortcut"})
        for key, value in _moved(half.mid_block.attentions[0], f"{side}.mid.attn_1", _VAE_ATTENTION).items():
            state[key] = value[:, :, None, None] if value.ndim == 2 else value  # a convolution there, linear here
        for i, block in enumerate(blocks):
            name = f"{side}.{way}.{i if way == 'down' else last - i}"
            for k, resnet in enumerate(block.resnets):
                state |= _moved(resnet, f"{name}.block.{k}", {"conv_shortcut": "nin_shortcut"})
            samplers = getattr(block, f"{way}samplers")
            if samplers is not None:
                state |= _moved(samplers[0].conv, f"{name}.{way}sample.conv")
    return state


def _moved(module: nn.Module, name: str, parts: dict[str, str] | None = None) -> dict[str, Tensor]:
    """The weights of a module under another name, with its own parts renamed."""
    moved = {}
    for key, value in module.state_dict().items():
        found = [(old, new) for old, new in (parts or {}).items() if key.startswith(f"{old}.")]
        renamed = found[0][1] + key.removeprefix(found[0][0]) if found else key
        moved[f"{name}.{renamed}"] = value
    return moved
