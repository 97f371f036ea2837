"""Weights shared out among processes (FSDP2): what must be arranged before it, and how they become one encoder again."""

import os

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, parse_flag_from_env
from open_clip.model import CustomTextCLIP
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from debias_diffusion.config import TrainConfig
from debias_diffusion.encoders.encoder import Encoder, build

_TABLE = "text.positional_embedding"
_FROZEN_ROWS = "text.parametrizations.positional_embedding.0.first"
_LATER_ROWS = "text.parametrizations.positional_embedding.original"


def make_accelerator(precision: str) -> Accelerator:
    """The accelerator of a run, as the launcher's variables describe it."""
    AcceleratorState._reset_state()  # a second run in one process may want another precision
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU")
    if on_cpu and parse_flag_from_env("ACCELERATE_USE_FSDP") and "WORLD_SIZE" in os.environ:
        # accelerate shards among what it calls GPUs and would, without a word, copy the weights to every CPU process.
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return Accelerator(mixed_precision={"fp32": "no"}.get(precision, precision))


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether weights are shared out among the processes."""
    return bool(accelerator.distributed_type == DistributedType.FSDP)


def sharding_problems(config: TrainConfig, accelerator: Accelerator) -> list[str]:
    """What a run with shared-out weights cannot do, one line each."""
    if not is_sharded(accelerator):
        return []
    rules = [
        (not accelerator.is_fsdp2, "fsdp_version must be 2; take train/configs/fsdp.yaml"),
        (config.ema_decay > 0, "--ema-decay does not go with FSDP yet; train with DDP or without the average"),
        (config.lora_rank > 0, "--lora-rank does not go with FSDP yet; adapters are small: train with DDP"),
    ]
    return [text for wrong, text in rules if wrong]


def make_shardable(clip: CustomTextCLIP, accelerator: Accelerator) -> None:
    """Gives the logit scale and bias the one axis that sharding needs, in place; call it before the optimiser is made.

    Weights stay in float32 while they are gathered too: the forward pass casts by autocast, as on one process, where
    FSDP's own policy would also round features and logit scale.
    """
    for name in ("logit_scale", "logit_bias"):
        parameter = getattr(clip, name)
        if parameter is not None:
            setattr(clip, name, nn.Parameter(parameter.detach().reshape(1), requires_grad=parameter.requires_grad))
    accelerator.state.fsdp_plugin.mixed_precision_policy = None


def local_part(tensor: Tensor) -> Tensor:
    """What of a tensor lies in this process: all of it where it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor; every process must call it where it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gathered_encoder(accelerator: Accelerator, model: nn.Module, encoder: Encoder) -> Encoder | None:
    """A plain encoder with the weights of all processes, on the main process; None on the others. All must call it.

    `model` is the prepared `TwoBranchModel`; what lies beside it, such as a frozen image tower, comes from `encoder`.
    """
    sharded = {name.removeprefix("clip."): t for name, t in accelerator.get_state_dict(model).items()}
    if not accelerator.is_main_process:
        return None
    state = {n: t for n, t in encoder.model.state_dict().items() if n not in sharded and n.startswith("visual.")}
    state |= sharded
    state[_TABLE] = torch.cat([whole(state.pop(_FROZEN_ROWS)).cpu(), state.pop(_LATER_ROWS)])
    return build(
        encoder.name, encoder.model_config, encoder.preprocess_config, tokenizer=encoder.tokenizer, state=state,
        history=encoder.history,
    )  # fmt: skip
