"""The encoder of a run: loaded, stretched, what trains of it chosen; and plain again at the end."""

from torch import nn
from torch.optim import AdamW

from debias_diffusion.config import TrainConfig
from debias_diffusion.encoders.checkpoint import load_encoder
from debias_diffusion.encoders.encoder import Encoder
from debias_diffusion.encoders.positions import freeze_first_positions, thaw_positions
from debias_diffusion.training.ema import WeightAverage
from debias_diffusion.training.freedom import freeze_text_layers, parameter_groups
from debias_diffusion.training.lora import add_lora, merge_lora
from debias_diffusion.training.optim import choose_towers, make_optimizer


def open_encoder(config: TrainConfig) -> Encoder:
    """The run's base at `context_length` positions, with gradients on for what trains alone.

    Raises ValueError where the loss that its towers were trained with has no use for a setting.
    """
    encoder = load_encoder(config.encoder, tokenizer=config.tokenizer or None).stretched(
        config.context_length, config.keep_positions, rule=config.stretch or None, in_place=True
    )
    if encoder.loss == "sigmoid" and config.label_smoothing:
        raise ValueError(
            f"--label-smoothing {config.label_smoothing} is for the softmax loss, but {encoder.name} has the sigmoid loss; "
            "leave it out"
        )
    clip = encoder.model
    choose_towers(clip, config.train_towers)
    freeze_first_positions(clip.text, config.keep_positions)
    if config.lora_rank:
        add_lora(clip, config.lora_rank, config.lora_alpha or None)
    freeze_text_layers(clip, config.frozen_text_layers)  # after the adapters, so that those below train as little
    if config.gradient_checkpointing:
        clip.set_grad_checkpointing(True)
    return encoder


def optimizer_of(model: nn.Module, config: TrainConfig) -> AdamW:
    """AdamW over what trains of `model`, with the learning rates of its towers."""
    groups = parameter_groups(
        model, config.learning_rate, text=config.text_learning_rate, image=config.image_learning_rate
    )
    return make_optimizer(groups, config.learning_rate, config.weight_decay, config.betas)


def make_plain(encoder: Encoder, average: WeightAverage | None) -> None:
    """Turns the trained towers into plain ones, in place: averaged weights, one position table, adapters merged."""
    if average:
        average.copy_to(encoder.model)
    thaw_positions(encoder.model.text)
    merge_lora(encoder.model)
