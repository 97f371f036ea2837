"""Big contrastive batches in little memory: features first, without a graph; then chunk by chunk, with one.

The loss needs all features of a batch at once, but the towers do not: its gradient with respect to each feature row is
all that a tower must know. So a first pass computes features alone, the loss is differentiated down to them, and a second
pass computes them again, chunk by chunk, and goes on from there. Activations are held for one chunk; the gradients are
those of the whole batch (gradient caching, Gao et al. 2021, arXiv 2101.06983).

They equal the plain step's as far as float32 goes: the plain step sums the gradient of a layer norm over every token of
the batch in one chain, while chunks sum it in parts, so at thousands of pairs they are the closer ones to the exact
gradient (`benchmarks/cached_gradients.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Inputs = tuple[Tensor, Tensor, Tensor]
"""Images, ids and pads in front, as `TwoBranchModel` takes them."""
Context = Callable[[], AbstractContextManager[object]]


def split_pairs(images: Tensor, input_ids: Tensor, num_prefix: Tensor, size: int) -> list[Inputs]:
    """Chunks of at most `size` pairs, each with both branches of its captions; an empty batch is one empty chunk."""
    ids, prefix = input_ids.chunk(2), num_prefix.chunk(2)
    parts = [slice(start, start + size) for start in range(0, max(1, len(images)), size)]
    return [(images[p], torch.cat([i[p] for i in ids]), torch.cat([n[p] for n in prefix])) for p in parts]


@dataclass(frozen=True)
class CachedFeatures:
    """A batch's features without a graph behind them, ready to be differentiated down to; `random` holds the state of
    the random generators before each chunk, so that the second pass drops the same patches as the first."""

    chunks: Sequence[Inputs]
    random: Sequence["_Random"]
    image: Tensor
    text: Tensor
    logit_scale: Tensor

    def backward(self, model: nn.Module, *, autocast: Context = nullcontext, no_sync: Context = nullcontext) -> None:
        """Adds to the parameters' gradients what the loss, already differentiated down to these features, asks of them.

        `model` may be wrapped for many processes: its gradients are exchanged once, with the last chunk, and the
        context that `no_sync` makes holds them back until then.
        """
        sizes = [len(images) for images, _, _ in self.chunks]
        image = _gradient(self.image).split(sizes)
        full, augmented = (part.split(sizes) for part in _gradient(self.text).chunk(2))
        for i, chunk in enumerate(self.chunks):
            last = i + 1 == len(self.chunks)
            with nullcontext() if last else no_sync():
                with self.random[i].restored(), autocast():
                    outputs = model(*on_device(chunk, self.image.device))
                asked = [image[i], torch.cat([full[i], augmented[i]]), torch.zeros_like(self.logit_scale)]
                if last:  # the scale has its whole gradient already
                    asked[2] = _gradient(self.logit_scale)
                terms = [
                    (output * gradient.to(output.dtype)).sum() for output, gradient in zip(outputs, asked, strict=True)
                ]
                torch.stack([t for t in terms if t.requires_grad]).sum().backward()


def cached_features(model: nn.Module, chunks: Sequence[Inputs], *, autocast: Context = nullcontext) -> CachedFeatures:
    """The features of all chunks, in order: image (batch, dim), text (2 * batch, dim; full branch first), logit scale.

    `model` is the bare `TwoBranchModel`. Call `backward` of a loss of the three, then that of what comes back.
    """
    device = next(model.parameters()).device
    random: list[_Random] = []
    image: list[Tensor] = []
    full: list[Tensor] = []
    augmented: list[Tensor] = []
    scale = torch.empty(0)
    with torch.no_grad(), autocast():
        for chunk in chunks:
            random.append(_Random.now(device))
            features, text, scale = model(*on_device(chunk, device))
            image.append(features)
            for branch, part in zip((full, augmented), text.chunk(2), strict=True):
                branch.append(part)
    leaves = [torch.cat(image), torch.cat([*full, *augmented]), scale.clone()]
    return CachedFeatures(chunks, random, *(leaf.detach().requires_grad_() for leaf in leaves))


@dataclass(frozen=True)
class _Random:
    cpu: Tensor
    device: torch.device
    on_device: Tensor | None

    @staticmethod
    def now(device: torch.device) -> "_Random":
        on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return _Random(torch.get_rng_state(), device, on_device)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Goes back to this state, and afterwards on from where the generators were."""
        with torch.random.fork_rng([self.device] if self.on_device is not None else []):
            torch.set_rng_state(self.cpu)
            if self.on_device is not None:
                torch.cuda.set_rng_state(self.on_device, self.device)
            yield


def on_device(chunk: Inputs, device: torch.device) -> Inputs:
    """The chunk with its images on `device`; ids and pads are sorted on the CPU first."""
    images, input_ids, num_prefix = chunk
    return images.to(device, non_blocking=True), input_ids, num_prefix


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
