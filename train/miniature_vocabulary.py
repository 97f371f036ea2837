"""The miniature's vocabulary in both its forms: CLIP's byte-pair file, and a transformers tokenizer as SigLIP's towers read."""

import gzip
import json
import re
from pathlib import Path

from open_clip.tokenizer import SimpleTokenizer
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from debias_diffusion.data.scenes import all_phrases

_CLIP_PIECES = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
"""What CLIP's tokenizer splits a text into before it looks for byte pairs."""


def write_vocabulary(path: Path) -> int:
    """Writes a CLIP byte-pair file in which every word of the world is one token; returns the vocabulary's size."""
    words = sorted({w for p in all_phrases() for w in re.findall(r"[a-z]+", re.sub(r"\{.*?\}", "", p.lower()))})
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=5000, end_of_word_suffix="</w>", min_frequency=1, show_progress=False)
    tokenizer.train_from_iterator([" ".join(words)], trainer)
    merges = [" ".join(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]]
    with gzip.GzipFile(path, "wb", mtime=0) as file:
        file.write("\n".join(["#version: 0.2", *merges]).encode())
    return 2 * 256 + len(merges) + 2


def write_siglip_tokenizer(vocabulary: Path, folder: Path) -> None:
    """Writes the byte pairs of `vocabulary` into `folder` as a transformers tokenizer with its card.

    Pieces keep their ids. CLIP's start token becomes the padding token, since SigLIP's rows start with a word, and its
    end token stays what it is.
    """
    pairs = SimpleTokenizer(str(vocabulary))
    renamed = {pairs.sot_token_id: "<pad>", pairs.eot_token_id: "</s>"}
    pieces = {renamed.get(i, piece): i for i, piece in pairs.decoder.items()}
    merges = [(left, right) for left, right in pairs.bpe_ranks]
    tokenizer = Tokenizer(
        models.BPE(vocab=pieces, merges=merges, end_of_word_suffix="</w>", continuing_subword_prefix="", unk_token=None)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_CLIP_PIECES), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", pairs.eot_token_id)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")
    fast.save_pretrained(folder)
    (folder / "README.md").write_text(_card(pairs.sot_token_id, pairs.eot_token_id))


def _card(pad_id: int, end_id: int) -> str:
    return f"""# The miniature SigLIP's tokenizer

The byte pairs of `../bpe.txt.gz` as a transformers tokenizer: the same pieces under the same ids, without a start token, with an
end token ({end_id}) after the words and a padding token of its own ({pad_id}), as SigLIP2 has them. MIT licence, like the code.
"""
