"""One way to clean a caption, shared by training, the SDXL adapter and the token counters."""

import html
import re

# open_clip's tokenizer takes these words in angle brackets for its own start and end token, in any case: a caption that
# quotes them would end there. A space before the underscore, where its words end anyway, changes no other id.
_TOKEN_NAME = re.compile(r"(start|end)(?=_of_text)", re.IGNORECASE)
_EMPTY_LINES = re.compile(r"\n{2,}")


def clean_caption(text: str) -> str:
    """The caption as the towers see it: repaired, unescaped, on one line, without white space around it.

    Does what open_clip's tokenizer does before lower-casing (ftfy, then HTML entities resolved twice), so cleaning
    first never changes the ids it gives. transformers' CLIPTokenizer does none of it: without this step curly quotes,
    ligatures, full-width letters and entities get other ids in an SDXL slot than they had in training. The one change
    beyond that: "<end_of_text>" and "<start_of_text>", which open_clip would take for its end and start token, are
    plain words.

    >>> clean_caption("  A “red” barn &amp; a ﬁeld.\\n\\nA caf&eacute;. ")
    'A "red" barn & a field. A café.'
    >>> clean_caption("A sign reads <end_of_text>.")
    'A sign reads <end _of_text>.'
    """
    return " ".join(clean_lines(text))


def clean_lines(text: str) -> list[str]:
    """The lines of a caption that hold text, each cleaned like `clean_caption`, which joins them with spaces.

    >>> clean_lines("A red barn\\r\\n\\r\\n  beside   a pond ")
    ['A red barn', 'beside a pond']
    """
    import ftfy  # costs more to import than the rest of this package, and only cleaning needs it

    text = _EMPTY_LINES.sub("\n", text)  # ftfy works line by line: a thousand empty ones cost as much as full ones
    repaired = _TOKEN_NAME.sub(r"\1 ", html.unescape(html.unescape(ftfy.fix_text(text))))
    lines = (" ".join(line.split()) for line in repaired.splitlines())
    return [line for line in lines if line]
