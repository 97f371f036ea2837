"""Stable Diffusion XL for text encoders of 248 tokens, of 77, or one of each. Only prompt encoding differs from diffusers.

    DiffusionPipeline.from_pretrained(
        base, custom_pipeline="pipelines/pipeline_debias_sdxl.py", trust_remote_code=True, **encoders_and_tokenizers
    )

Every text of a call, negatives included, gets the same number of rows for the UNet to attend to. `max_length="auto"`
makes them 77 where all fit 77 tokens, else as many chunks of the encoder's length (248) as the longest text needs, up to
992 rows; a number asks for so many. What does not fit is cut at the end, EOS kept, and logged; `prompt_report` tells the
words. Chunks have their own BOS and EOS and end where a sentence ends, else a phrase, else a word. An encoder shorter
than the rows (77 beside 248) is run in chunks too; rows still missing are those it gives the padding of an empty prompt,
never zeros. Pooled vectors are the first chunk's.

A str with the attributes `weights` ((start, end, weight), ...) and `breaks` (positions), as debias_diffusion.sdxl.weights
makes, has each weighted token's row moved along the line from the empty prompt's row in that place, and starts a new
chunk at each break (of 77 rows where all pieces fit); pooled vectors are those of the plain text.
"""

import inspect
import re
from functools import wraps
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from diffusers import StableDiffusionXLPipeline
from diffusers.utils import logging, scale_lora_layers
from torch import Tensor

SHORT = 77  # rows the UNet was trained with
MAX_ROWS = 992  # "auto" grows no further
SLOTS = {"text_encoder": "tokenizer", "text_encoder_2": "tokenizer_2"}
TEXTS = ("prompt", "prompt_2", "negative_prompt", "negative_prompt_2")
EMBEDS = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")

# Where a chunk may end, best first: matched against the text up to and with the next token's first character.
_SENTENCE, _PHRASE, _WORD = r"[.!?…][\"'”’)\]]*\s+[^a-z]|[。！？].", r"[,;:]\s+\S|[，、；：].", re.compile(r"\S+")
_ENDS = [re.compile(f"(?:{end})$") for end in (_SENTENCE, _PHRASE, r"\s\S", ".")]
# Weighting that would be read as words: (cat:2) (4k:1.2) \( ((cat)) BREAK
_WEIGHTING = re.compile(r"(?:[^\W\d_]:[+-]?\d+|:[+-]?\d*\.\d+)\)|\\[()\[\]]|\(\(\w|(?<![A-Z] )\bBREAK\b(?! [A-Z]{2})")
logger = logging.get_logger(__name__)


class PromptReport(NamedTuple):
    """What one text encoder reads of one text: tokens count BOS and EOS, `cut` are spans of words in `text` it never sees."""

    index: int
    slot: str
    negative: bool
    text: str
    num_tokens: int
    limit: int
    chunks: int
    cut: tuple[tuple[int, int], ...]


class _Reading(NamedTuple):
    """A text as one slot's tokens without BOS and EOS, each with its span of characters."""

    text: str
    ids: list[int]
    spans: list[tuple[int, int]]

    def segments(self) -> list[range]:
        """Token ranges between the text's breaks, empty only where the whole text is."""
        starts = [sum(start < position for start, _ in self.spans) for position in getattr(self.text, "breaks", ())]
        return [range(a, b) for a, b in pairwise([0, *starts, len(self.ids)]) if a < b] or [range(0)]

    def chunks(self, room: int, limit: int | None = None) -> list[range]:
        """Token ranges of at most `room` tokens; of more than `limit` of them the last is filled up and the rest lost."""
        parts = []
        for segment in self.segments():
            while len(segment) > room:
                full, half = segment.start + room, segment.start + room // 2
                starts = {i: a for i in range(full, half, -1) if (a := self.spans[i][0]) > self.spans[i - 1][0]}
                hits = (i for end in _ENDS for i, a in starts.items() if end.search(self.text, max(0, a - 8), a + 1))
                stop = full if len(parts) + 1 == limit else next(hits, full)
                parts.append(range(segment.start, stop))
                segment = range(stop, segment.stop)
            parts.append(segment)
        return parts[:limit]

    def weights(self, chunk: range, length: int) -> list[float]:
        """Weight of every row of a chunk."""
        spans = getattr(self.text, "weights", None) or ()
        weights = (next((w for a, b, w in spans if a <= self.spans[i][0] < b), 1.0) for i in chunk)
        return [1.0, *weights, *[1.0] * (length - 1 - len(chunk))]


class DebiasStableDiffusionXLPipeline(StableDiffusionXLPipeline):
    """SDXL whose prompts are read whole; rules at the top of this file, all else as in StableDiffusionXLPipeline."""

    @torch.no_grad()
    @wraps(StableDiffusionXLPipeline.__call__)
    def __call__(self, *args, max_length="auto", **kwargs):
        call = inspect.signature(StableDiffusionXLPipeline.__call__).bind(self, *args, **kwargs)
        call.apply_defaults()
        _, options, extra = call.arguments.pop("self"), call.arguments, call.arguments.pop("kwargs")
        for name in extra.keys() - {"callback", "callback_steps"}:
            raise TypeError(f"the pipeline takes no argument {name!r}; it takes max_length, {', '.join(options)}")
        embeds = self.prompt_embeddings(
            **{name: options[name] for name in TEXTS + EMBEDS},
            do_classifier_free_guidance=options["guidance_scale"] > 1 and self.unet.config.time_cond_proj_dim is None,
            lora_scale=(options["cross_attention_kwargs"] or {}).get("scale"),
            clip_skip=options["clip_skip"],
            max_length=max_length,
        )
        return super().__call__(**options | dict.fromkeys(TEXTS) | embeds, **extra)

    def prompt_embeddings(self, *args, **kwargs) -> dict[str, Tensor]:
        """What `encode_prompt` returns, by the names every SDXL pipeline takes them; no negatives without guidance."""
        named = zip(EMBEDS, self.encode_prompt(*args, **kwargs), strict=True)
        return {name: value for name, value in named if value is not None}

    def encode_prompt(
        self, prompt=None, prompt_2=None, device=None, num_images_per_prompt=1, do_classifier_free_guidance=True,
        negative_prompt=None, negative_prompt_2=None, prompt_embeds=None, negative_prompt_embeds=None,
        pooled_prompt_embeds=None, negative_pooled_prompt_embeds=None, lora_scale=None, clip_skip=None, max_length="auto",
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:  # fmt: skip
        """Embeddings (batch, rows, dim) of prompts and negatives, then their pooled vectors (batch, dim), as in diffusers.

        A string goes with every entry of a list. `prompt_2` is `prompt` where it is None, `negative_prompt_2` is
        `negative_prompt`; an empty string is an empty prompt. `clip_skip` holds for negatives too.
        """
        device = device or self._execution_device
        sides = [(prompt_embeds, pooled_prompt_embeds), (negative_prompt_embeds, negative_pooled_prompt_embeds)]
        texts = (prompt, prompt_2, negative_prompt, negative_prompt_2)
        readings = self._readings(texts, sides, do_classifier_free_guidance)
        given = {states.shape[1] for states, _ in sides if states is not None}
        if len(given) > 1:
            raise ValueError(f"positive and negative embeddings have {given} rows; encode both in one call")
        rows, lengths = self._plan(readings, given.pop() if given else max_length)
        for row in self._reports(readings, rows, lengths):
            if row.cut:
                lost = row.text[row.cut[0][0] :]
                logger.warning(f"{row.slot} reads {row.limit} of {row.num_tokens} tokens and not: {lost!r}")
        lora_scaling = self._scale_loras(lora_scale)
        try:
            parts = {k: self._encode(k[1], v, rows, lengths[k[1]], clip_skip, device) for k, v in readings.items()}
        finally:
            for scaling, before in lora_scaling:
                scaling.update(before)
        for negative in {negative for negative, _ in parts}:
            own, pooled = [part for key, part in parts.items() if key[0] == negative], sides[negative][1]
            sides[negative] = torch.cat([part[0] for part in own], dim=-1), own[-1][1] if pooled is None else pooled
        if do_classifier_free_guidance and sides[1][0] is None:
            sides[1] = torch.zeros_like(sides[0][0]), torch.zeros_like(sides[0][1])
        dtype = (self.unet or self.text_encoder_2 or sides[0][0]).dtype
        flat = [tensor for column in zip(*sides, strict=True) for tensor in column]
        return tuple(t if t is None else t.to(device, dtype).repeat_interleave(num_images_per_prompt, 0) for t in flat)

    def prompt_report(self, prompt, prompt_2=None, negative_prompt=None, negative_prompt_2=None, max_length="auto"):
        """List of `PromptReport`, one for each encoder and text of a call with these arguments."""
        readings = self._readings((prompt, prompt_2, negative_prompt, negative_prompt_2), [(None, None)] * 2, True)
        return list(self._reports(readings, *self._plan(readings, max_length)))

    def _readings(self, texts, sides, guided) -> dict[tuple[bool, str], list[_Reading]]:
        """Texts as tokens by (negative, slot), where embeddings are not given and zeros will not do."""
        columns = zip(TEXTS + EMBEDS[:2], (*texts, *(states for states, _ in sides)), strict=True)
        counts = {name: len(value) for name, value in columns if isinstance(value, list | Tensor)}
        if len(set(counts.values())) > 1 or 0 in counts.values():
            raise ValueError(f"every list must hold one entry a picture, got {counts}; a string goes with all of them")
        readings = {}
        for negative, (states, pooled) in enumerate(sides):
            own, (first, second) = EMBEDS[negative::2], texts[2 * negative :][:2]
            is_text = first is not None or second is not None
            if states is not None and (is_text or pooled is None or states.ndim != 3):
                wrong = f"{own[0]} must come with {own[1]}, without texts, and as (pictures, rows, dim)"
                raise ValueError(f"{wrong}; encode_prompt gives both")
            zeros = not is_text and self.config.force_zeros_for_empty_prompt
            if states is not None or (negative and (zeros or not guided)):
                continue
            if self.text_encoder_2 is None or (first is None and not negative):
                raise ValueError(f"no prompt, or no text_encoder_2 to read it with; give both, or {' and '.join(own)}")
            first = "" if first is None else first
            for slot, text in zip(SLOTS, (first, first if second is None else second), strict=True):
                column = text if isinstance(text, list) else [text] * next(iter(counts.values()), 1)
                if getattr(self, slot) is not None:
                    readings[negative == 1, slot] = [self._read(getattr(self, SLOTS[slot]), entry) for entry in column]
        return readings

    def _read(self, tokenizer, text) -> _Reading:
        if not isinstance(text, str):
            raise ValueError(f"a prompt is {text!r}; expected a string, or a list of strings")
        weighting = _WEIGHTING.search(text) if getattr(text, "weights", None) is None else None
        if weighting:
            found = text[max(0, weighting.start() - 20) : weighting.end()]
            raise ValueError(f"{found!r} is weighting, not words; use debias_diffusion.sdxl.weights, or plain words")
        tokens = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        added = tokenizer.added_tokens_decoder  # the textual inversions, which can have several vectors, among them
        named = {i: self.maybe_convert_prompt(str(added[i]), tokenizer) for i in added.keys() & tokens.input_ids}
        vectors = {i: tokenizer(name, add_special_tokens=False).input_ids for i, name in named.items()}
        expanded = [vectors.get(i, [i]) for i in tokens.input_ids]
        spans = [span for span, ids in zip(tokens.offset_mapping, expanded, strict=True) for _ in ids]
        return _Reading(text, [i for ids in expanded for i in ids], spans)

    def _plan(self, readings, max_length) -> tuple[int, dict[str, int]]:
        """Rows of the call, and the length of each encoder's chunks."""
        lengths = {slot: getattr(self, slot).config.max_position_embeddings for _, slot in readings}
        if max_length == "auto":
            columns = [(slot, reading) for (_, slot), column in readings.items() for reading in column]
            if all(len(segment) + 2 <= SHORT for _, reading in columns for segment in reading.segments()):
                lengths = {slot: min(SHORT, length) for slot, length in lengths.items()}
            rows = max(lengths[slot] * len(reading.chunks(lengths[slot] - 2)) for slot, reading in columns)
            max_length = min(rows, MAX_ROWS)
        if not isinstance(max_length, int) or max_length < 3:
            raise ValueError(f"max_length is {max_length!r}, expected 'auto' or a number of rows, 3 or more")
        return max_length, {slot: min(length, max_length) for slot, length in lengths.items()}

    def _reports(self, readings, rows, lengths):
        for (negative, slot), column in readings.items():
            room, count = lengths[slot] - 2, rows // lengths[slot]
            for index, reading in enumerate(column):
                chunks = reading.chunks(room, count)
                unread = reading.spans[chunks[-1].stop :]
                cut = tuple(word.span() for word in _WORD.finditer(reading.text, unread[0][0])) if unread else ()
                counts = len(reading.ids) + 2, count * room + 2, len(chunks)
                yield PromptReport(index, slot, negative, reading.text, *counts, cut)

    def _encode(self, slot, readings, rows, length, clip_skip, device) -> tuple[Tensor, Tensor | None]:
        """Hidden states (batch, rows, dim) and, of the second slot, pooled vectors (batch, dim)."""
        chunks = [(reading, chunk) for reading in readings for chunk in reading.chunks(length - 2, rows // length)]
        ids = [reading.ids[chunk.start : chunk.stop] for reading, chunk in chunks]
        states, pooled = self._run(slot, ids, length, clip_skip, device)
        counts = [len(reading.chunks(length - 2, rows // length)) for reading in readings]
        weights = torch.tensor([reading.weights(chunk, length) for reading, chunk in chunks]).to(states)[..., None]
        filling = states[0, :0]
        if min(counts) * length < rows or bool((weights != 1).any()):
            empty = self._run(slot, [[]], length, clip_skip, device)[0]  # (1, length, dim)
            filling = empty[0, 2:].repeat(rows // (length - 2) + 1, 1)
            states = torch.where(weights == 1, states, empty + weights * (states - empty))
        texts = [torch.cat([*own, filling[: rows - len(own) * length]]) for own in states.split(counts)]
        return torch.stack(texts), None if pooled is None else pooled[[0, *accumulate(counts[:-1])]]

    def _run(self, slot, ids, length, clip_skip, device) -> tuple[Tensor, Tensor | None]:
        """One forward: the layer SDXL reads (chunks, length, dim) and, of the second slot, pooled (chunks, dim)."""
        encoder, tokenizer = getattr(self, slot), getattr(self, SLOTS[slot])
        skip, layers = clip_skip or 0, encoder.config.num_hidden_layers
        if not -1 <= skip < layers:
            raise ValueError(f"clip_skip is {clip_skip}; {slot} has {layers} layers and takes -1 to {layers - 1}")
        pads = [tokenizer.pad_token_id] * length
        table = torch.tensor([[tokenizer.bos_token_id, *row, tokenizer.eos_token_id, *pads][:length] for row in ids])
        if table.max() >= encoder.get_input_embeddings().weight.shape[0]:
            token = tokenizer.convert_ids_to_tokens(int(table.max()))
            raise ValueError(f"{SLOTS[slot]} knows {token!r}, {slot} does not; load textual inversions after swapping")
        is_hooked = hasattr(encoder, "_hf_hook") or hasattr(encoder, "_diffusers_hook")
        output = encoder(table.to(device if is_hooked else encoder.device), output_hidden_states=True)
        if slot == "text_encoder_2" and not hasattr(output, "text_embeds"):
            raise ValueError(f"{slot} is a {type(encoder).__name__}, expected CLIPTextModelWithProjection")
        return output.hidden_states[-2 - skip], output.text_embeds if slot == "text_encoder_2" else None

    def _scale_loras(self, scale) -> list[tuple[dict, dict]]:
        """Sets the LoRA layers of both encoders to `scale`; returns every layer's scaling and what it was."""
        encoders = [encoder for encoder in (self.text_encoder, self.text_encoder_2) if encoder is not None]
        layers = [module for encoder in encoders for module in encoder.modules() if hasattr(module, "lora_A")]
        scaling = [(layer.scaling, dict(layer.scaling)) for layer in layers]
        for encoder in encoders if layers and scale is not None else ():
            scale_lora_layers(encoder, scale)
        return scaling
