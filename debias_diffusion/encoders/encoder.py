"""An encoder: both towers, tokenizer and picture transform, with the config that rebuilds them."""

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import open_clip
import torch
from open_clip.model import CustomTextCLIP
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from torch import Tensor

from debias_diffusion.encoders.positions import set_context_length, stretch_text_tower
from debias_diffusion.encoders.specs import KEEP, EncoderSpec, StretchRule
from debias_diffusion.encoders.tokens import Tokenizer

MINIATURE_FOLDER = Path(__file__).resolve().parent.parent / "miniature"


@dataclass(frozen=True)
class Encoder:
    """Towers are `model.visual` and `model.text`; `model_config` and `preprocess_config` are open_clip's own dictionaries.

    `history` says how the encoder came to be (base, recipe, steps, data): kept in its folder, read by people.
    """

    name: str
    model: CustomTextCLIP
    tokenizer: Tokenizer
    model_config: dict[str, Any]
    preprocess_config: dict[str, Any]
    history: dict[str, Any] = field(default_factory=dict)

    @property
    def context_length(self) -> int:
        return self.tokenizer.context_length

    @property
    def device(self) -> torch.device:
        return self.model.logit_scale.device

    @property
    def preprocess(self) -> Callable[[Image.Image], Tensor]:
        """RGB picture -> (3, height, width), resized, cropped and normalised as the encoder expects."""
        return image_transform_v2(PreprocessCfg(**self.preprocess_config), is_train=False)

    @property
    def loss(self) -> Literal["softmax", "sigmoid"]:
        """The loss its towers were trained with: sigmoid models carry a logit bias."""
        return "softmax" if self.model.logit_bias is None else "sigmoid"

    def stretched(
        self, context_length: int, keep: int = KEEP, *, rule: StretchRule | None = None, in_place: bool = False
    ) -> "Encoder":
        """A copy whose text tower has `context_length` positions (see `positions.stretch_text_tower`).

        `in_place` takes this encoder's own towers, for models too large to hold twice.
        """
        model = self.model if in_place else copy.deepcopy(self.model)
        stretch_text_tower(model.text, context_length, keep, rule)
        model.context_length = context_length
        config = copy.deepcopy(self.model_config)
        config["text_cfg"]["context_length"] = context_length
        return replace(self, model=model, tokenizer=self.tokenizer.with_context(context_length), model_config=config)


def spec_config(spec: EncoderSpec) -> dict[str, Any]:
    """The open_clip model config of a row, activation included."""
    config = copy.deepcopy(spec.config) if spec.config else open_clip.get_model_config(spec.architecture)
    if config is None:
        raise ValueError(
            f"this open_clip ({open_clip.__version__}) knows no architecture {spec.architecture!r}; update it"
        )
    if bool(config.get("quick_gelu", False)) != spec.quick_gelu and spec.config is None:
        raise ValueError(f"open_clip's {spec.architecture!r} does not have the activation that row {spec.name!r} needs")
    config["quick_gelu"] = spec.quick_gelu
    return config


def build(
    name: str,
    model_config: dict[str, Any],
    preprocess_config: dict[str, Any] | None = None,
    *,
    bpe_file: Path | None = None,
    tokenizer: Tokenizer | None = None,
    state: dict[str, Tensor] | None = None,
    history: dict[str, Any] | None = None,
) -> Encoder:
    """An encoder in float32 with the given weights, or random ones where `state` is None; keys must match exactly.

    `tokenizer` is for towers that do not read CLIP's byte pairs (`text_cfg` then has `hf_tokenizer_name`).
    """
    config = {k: copy.deepcopy(v) for k, v in model_config.items() if k != "custom_text"}
    tokenizer = _tokenizer_for(name, config["text_cfg"], bpe_file, tokenizer)
    with torch.device("meta" if state is not None else "cpu"):
        model = CustomTextCLIP(**copy.deepcopy(config))
    if state is not None:
        _load(model, state, name)
    model.eval()
    preprocess = PreprocessCfg(**(preprocess_config or {}))
    preprocess.size = model.visual.image_size
    open_clip.model.set_model_preprocess_cfg(model, vars(preprocess))
    return Encoder(name, model, tokenizer, {**config, "custom_text": True}, vars(preprocess), history or {})


def _tokenizer_for(
    name: str, text_config: dict[str, Any], bpe_file: Path | None, tokenizer: Tokenizer | None
) -> Tokenizer:
    """The tokenizer of a tower, checked against it; its padding id goes into `text_config`, where rows are filled."""
    hub_name = text_config.get("hf_tokenizer_name")
    if hub_name and tokenizer is None:
        raise ValueError(f"{name} reads with the tokenizer of {hub_name}, which is not part of open_clip; give it")
    context_length = text_config.get("context_length", 77)
    if tokenizer is None:
        tokenizer = Tokenizer(context_length, bpe_file)
    elif tokenizer.context_length != context_length:
        tokenizer = tokenizer.with_context(context_length)
    if hub_name:
        text_config["pad_id"] = tokenizer.layout.pad_id
    # A vocabulary of the folder's own must be the very one; others may serve a tower with rows to spare.
    spare = text_config.get("vocab_size", 49408) - tokenizer.vocab_size
    if spare < 0 or (bpe_file and spare):
        raise ValueError(
            f"{name}: the tokenizer has {tokenizer.vocab_size} ids, the text tower {text_config.get('vocab_size', 49408)}; "
            "the encoder's own vocabulary file is missing or damaged"
        )
    return tokenizer


def _load(model: CustomTextCLIP, state: dict[str, Tensor], name: str) -> None:
    wanted = model.state_dict()
    missing, unknown = sorted(wanted.keys() - state.keys()), sorted(state.keys() - wanted.keys())
    if missing or unknown:
        raise ValueError(
            f"{name}: weights missing {missing[:5]}, unknown {unknown[:5]}; is this the right architecture?"
        )
    for key, tensor in wanted.items():
        one = tensor.numel() == state[key].numel() == 1  # logit scales are () or (1,)
        if tensor.shape != state[key].shape and not one:
            raise ValueError(
                f"{name}: {key} has shape {tuple(state[key].shape)} in the file, {tuple(tensor.shape)} in the model; "
                "is this the right architecture and context length?"
            )
        if not state[key].is_floating_point() or not bool(torch.isfinite(state[key]).all()):
            raise ValueError(f"{name}: {key} holds numbers that are not finite floats; the file is damaged")
    float_state = {k: v.float().reshape(wanted[k].shape) for k, v in state.items()}
    model.load_state_dict(float_state, assign=True)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    set_context_length(model.text, model.text.context_length)
    logging.getLogger(__name__).info("loaded %d tensors into %s", len(state), name)
