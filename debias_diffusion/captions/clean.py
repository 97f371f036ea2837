"""One way to clean a caption, shared by training, the SDXL adapter and the token counters."""

import html


def clean_caption(text: str) -> str:
    """The caption as the towers see it: repaired, unescaped, on one line, without white space around it.

    Does what open_clip's tokenizer does before lower-casing (ftfy, then HTML entities resolved twice), so cleaning
    first never changes the ids it gives. transformers' CLIPTokenizer does none of it: without this step curly quotes,
    ligatures, full-width letters and entities get other ids in an SDXL slot than they had in training.

    >>> clean_caption("  A “red” barn &amp; a ﬁeld.\\n\\nA caf&eacute;. ")
    'A "red" barn & a field. A café.'
    """
    return " ".join(clean_lines(text))


def clean_lines(text: str) -> list[str]:
    """The lines of a caption that hold text, each cleaned like `clean_caption`, which joins them with spaces.

    >>> clean_lines("A red barn\\r\\n\\r\\n  beside   a pond ")
    ['A red barn', 'beside a pond']
    """
    import ftfy  # costs more to import than the rest of this package, and only cleaning needs it

    repaired = html.unescape(html.unescape(ftfy.fix_text(text)))
    lines = (" ".join(line.split()) for line in repaired.splitlines())
    return [line for line in lines if line]
