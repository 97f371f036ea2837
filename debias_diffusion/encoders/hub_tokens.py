"""Tokenizers of transformers, for towers that do not read CLIP's byte pairs: from a folder, or from the hub by name."""

import logging
from pathlib import Path
from typing import Any

from open_clip.tokenizer import get_clean_fn

from debias_diffusion.captions.clean import clean_caption
from debias_diffusion.encoders.tokens import Tokenizer, TokenLayout, vocabulary_digest

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
"""What a folder must hold to be read as a tokenizer."""

ALL_FILES = (*TOKENIZER_FILES, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
"""What transformers may write of a tokenizer."""


class HubTokenizer(Tokenizer):
    """A transformers tokenizer that ends every row in EOT and may start it with SOT, as SigLIP's does not.

    `kwargs` are open_clip's `tokenizer_kwargs` of the model: `clean` names how captions are cleaned (SigLIP's
    "canonicalize" lower-cases and drops punctuation).
    """

    def __init__(self, context_length: int, tokenizer: Any, kwargs: dict[str, Any] | None = None) -> None:
        self.context_length, self.bpe_file = context_length, None
        self.kwargs = dict(kwargs or {})
        other = sorted(self.kwargs.keys() - {"clean"})
        if other:
            raise ValueError(f"tokenizer_kwargs {', '.join(other)} are not supported; expected clean alone")
        self._clean = get_clean_fn(self.kwargs.get("clean", "whitespace"))
        self._hub = tokenizer
        ends = tokenizer("").input_ids
        if len(ends) not in (1, 2) or ends[-1] != tokenizer.eos_token_id or tokenizer.pad_token_id is None:
            raise ValueError(
                f"an empty caption becomes {ends} with this tokenizer, its end id is {tokenizer.eos_token_id} and its "
                f"padding id {tokenizer.pad_token_id}; expected its end id last, at most a start id before it, and padding"
            )
        self.layout = TokenLayout(has_sot=len(ends) == 2, pad_id=tokenizer.pad_token_id)
        self.sot_id, self.eot_id = ends[0], ends[-1]  # without a start token both are the end
        # Added tokens, such as T5's <extra_id_0>, may lie beyond a tower's table; no caption that is cleaned has them.
        ids = set(tokenizer.get_vocab().values()) - tokenizer.added_tokens_decoder.keys()
        self.vocab_size = 1 + max(*ids, self.eot_id, self.layout.pad_id)

    def with_context(self, context_length: int) -> "HubTokenizer":
        """The same vocabulary at another context length."""
        return HubTokenizer(context_length, self._hub, self.kwargs)

    def encode_words(self, caption: str) -> list[int]:
        """The ids of a caption's words alone, cut nowhere."""
        return self._hub(self._clean(clean_caption(caption)), add_special_tokens=False, verbose=False).input_ids

    def piece(self, token: int) -> str:
        """What one id stands for, as people read it."""
        return self._hub.convert_ids_to_tokens(token).replace("▁", " ").replace("</w>", " ")

    @property
    def identity(self) -> str:
        """What tells this vocabulary from another: a hash of its pieces and rules."""
        return vocabulary_digest(f"{self._hub.backend_tokenizer.to_str()} {self.kwargs}".encode())

    def save(self, folder: Path) -> dict[str, Any]:
        """Writes the tokenizer into `folder`; returns the `tokenizer_kwargs` that go with it."""
        self._hub.save_pretrained(folder)
        return dict(self.kwargs)


def read_tokenizer(folder: Path, context_length: int, kwargs: dict[str, Any] | None = None) -> HubTokenizer:
    """The tokenizer in `folder`; nothing is fetched. Raises FileNotFoundError naming the files that are missing."""
    missing = [name for name in TOKENIZER_FILES if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{folder} holds no tokenizer: {' and '.join(missing)} not found there")
    from transformers import AutoTokenizer

    try:
        hub = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare Exceptions for what it cannot parse
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"the tokenizer in {folder} cannot be read: {reason}") from error
    return HubTokenizer(context_length, hub, kwargs)


def find_tokenizer(
    hub_name: str,
    context_length: int,
    kwargs: dict[str, Any] | None = None,
    *,
    folders: tuple[Path | None, ...] = (),
    fetch: bool = False,
) -> HubTokenizer:
    """The first tokenizer found: in `folders`, in the hub's local cache, and on the hub itself if `fetch` says so.

    Raises FileNotFoundError that says which files to place where.
    """
    places = [folder for folder in folders if folder is not None]
    for folder in places:
        if all((folder / name).is_file() for name in TOKENIZER_FILES):
            return read_tokenizer(folder, context_length, kwargs)
    from transformers import AutoTokenizer

    try:
        hub = AutoTokenizer.from_pretrained(hub_name, local_files_only=not fetch)
    except (OSError, ValueError) as error:
        reason = "could not be fetched" if fetch else "is fetched only for ROW:TAG, a name on the hub"
        looked = f"; looked in {', '.join(map(str, places))}" if places else ""
        raise FileNotFoundError(
            f"the tokenizer of {hub_name} is not here and {reason}{looked}. Place its {' and '.join(TOKENIZER_FILES)} "
            f"in a folder and name that folder as the tokenizer, or beside the weights"
        ) from error
    logging.getLogger(__name__).info("tokenizer %s", hub_name)
    return HubTokenizer(context_length, hub, kwargs)
