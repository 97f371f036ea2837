"""Key tables between open_clip's towers and transformers' CLIP; both directions, nothing guessed, nothing dropped."""

import re

import torch
from torch import Tensor

# transformers <-> open_clip, inside one residual block; query, key and value are handled apart because they are fused.
_BLOCK = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "self_attn.out_proj": "attn.out_proj",
}
_TEXT = {
    "embeddings.token_embedding.weight": "token_embedding.weight",
    "embeddings.position_embedding.weight": "positional_embedding",
    "final_layer_norm.weight": "ln_final.weight",
    "final_layer_norm.bias": "ln_final.bias",
}
_VISION = {
    "embeddings.class_embedding": "class_embedding",
    "embeddings.patch_embedding.weight": "conv1.weight",
    "embeddings.position_embedding.weight": "positional_embedding",
    "pre_layrnorm.weight": "ln_pre.weight",
    "pre_layrnorm.bias": "ln_pre.bias",
    "post_layernorm.weight": "ln_post.weight",
    "post_layernorm.bias": "ln_post.bias",
}
_BLOCK_BACK = {ours: theirs for theirs, ours in _BLOCK.items()}
_TEXT_BACK = {ours: theirs for theirs, ours in _TEXT.items()}
_QKV = ("q_proj", "k_proj", "v_proj")

StateDict = dict[str, Tensor]


def text_to_transformers(text: StateDict) -> StateDict:
    """A text tower (open_clip keys without `text.`) under transformers' keys with `text_model.`.

    `text_projection.weight` is the transpose of `text_projection`. Raises ValueError for an unknown key.
    """
    out: StateDict = {}
    for key, value in text.items():
        if key in _TEXT_BACK:
            out[f"text_model.{_TEXT_BACK[key]}"] = value.clone()
        elif key == "text_projection":
            out["text_projection.weight"] = value.T.contiguous()
        elif (block := re.fullmatch(r"transformer\.resblocks\.(\d+)\.(.+)\.(weight|bias)", key)) and block[
            2
        ] in _BLOCK_BACK:
            out[f"text_model.encoder.layers.{block[1]}.{_BLOCK_BACK[block[2]]}.{block[3]}"] = value.clone()
        elif fused := re.fullmatch(r"transformer\.resblocks\.(\d+)\.attn\.in_proj_(weight|bias)", key):
            for name, part in zip(_QKV, value.chunk(3), strict=True):
                out[f"text_model.encoder.layers.{fused[1]}.self_attn.{name}.{fused[2]}"] = part.clone()
        else:
            raise ValueError(f"a CLIP text tower has no weight {key!r}, so it cannot go into a transformers folder")
    return out


def text_from_transformers(state: StateDict) -> StateDict:
    """The way back: transformers' text keys, with or without `text_model.`, to open_clip's without `text.`."""
    state = {k.removeprefix("text_model."): v for k, v in state.items()}
    projection = state.pop("text_projection.weight", None)
    out = _tower(state, _TEXT)
    if projection is not None:
        out["text_projection"] = projection.T.contiguous()
    return out


def clip_from_transformers(state: StateDict) -> StateDict:
    """A whole transformers `CLIPModel` state dict to open_clip's keys (`visual.*`, `text.*`, `logit_scale`)."""
    state = {k: v for k, v in state.items() if not k.endswith("position_ids")}
    text = {k: v for k, v in state.items() if k.startswith(("text_model.", "text_projection."))}
    vision = {k.removeprefix("vision_model."): v for k, v in state.items() if k.startswith("vision_model.")}
    rest = (
        state.keys() - text.keys() - {f"vision_model.{k}" for k in vision} - {"logit_scale", "visual_projection.weight"}
    )
    if rest:
        raise ValueError(f"a transformers CLIPModel has no weights {sorted(rest)[:5]}")
    if missing := {"logit_scale", "text_projection.weight", "visual_projection.weight"} - state.keys():
        raise ValueError(f"a transformers CLIPModel needs {sorted(missing)}, which the file has not")
    out = {f"text.{k}": v for k, v in text_from_transformers(text).items()}
    out |= {f"visual.{k}": v for k, v in _tower(vision, _VISION).items()}
    out["visual.proj"] = state["visual_projection.weight"].T.contiguous()
    out["logit_scale"] = state["logit_scale"]
    return out


def _tower(state: StateDict, table: dict[str, str]) -> StateDict:
    out: StateDict = {}
    fused: dict[tuple[str, str], dict[str, Tensor]] = {}
    for key, value in state.items():
        if key in table:
            out[table[key]] = value
        elif (block := re.fullmatch(r"encoder\.layers\.(\d+)\.(.+)\.(weight|bias)", key)) and block[2] in _BLOCK:
            out[f"transformer.resblocks.{block[1]}.{_BLOCK[block[2]]}.{block[3]}"] = value
        elif part := re.fullmatch(r"encoder\.layers\.(\d+)\.self_attn\.([qkv]_proj)\.(weight|bias)", key):
            fused.setdefault((part[1], part[3]), {})[part[2]] = value
        elif not key.endswith("position_ids"):
            raise ValueError(f"a transformers CLIP tower has no weight {key!r}")
    for (layer, kind), parts in fused.items():
        missing = [name for name in _QKV if name not in parts]
        if missing:
            raise ValueError(f"layer {layer} has no {missing[0]} {kind}")
        out[f"transformer.resblocks.{layer}.attn.in_proj_{kind}"] = torch.cat([parts[name] for name in _QKV])
    return out
