"""Published recall@1 as data, and which of it may stand beside our own numbers.

Papers give one name to several protocols: four "DCI", three "Flickr30k". A row may be compared only where pictures,
captions and their wording are the same; every other row is still shown, with the reason why it must not be.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Protocol:
    """What a published number was measured on; `comparable` are our benchmarks asked the same way, `related` the rest
    of those that share the name."""

    text: str
    comparable: tuple[str, ...]
    related: tuple[str, ...] = ()


@dataclass(frozen=True)
class Published:
    """One published row: recall@1 in percent, text to image and image to text, None where no number was given."""

    model: str
    protocol: str
    t2i: float | None
    i2t: float | None
    source: str


_COCO = ("coco", "coco-first5")
_FLICKR = ("flickr30k", "flickr30k-raw", "flickr30k-1k")
_DCI = ("dci", "dci-split")

PROTOCOLS: dict[str, Protocol] = {
    "urban1k": Protocol("Urban1k, 1,000 pairs", ("urban1k",)),
    "urban1k-lotlip": Protocol("captions cut at full stops and re-joined (LoTLIP)", (), ("urban1k",)),
    "docci": Protocol("DOCCI test, 5,000 pairs", ("docci",)),
    "dci": Protocol("short and extra caption without a separator, 7,805 pairs", ("dci",), _DCI),
    "dci-lotlip": Protocol("captions cut at full stops and re-joined, 7,805 pairs (LoTLIP)", ("dci-split",), _DCI),
    "dci-hyfl": Protocol("HyFL-CLIP's DCI: other captions, the same weights score 4 to 8 points higher", (), _DCI),
    "long-dci": Protocol("Long-DCI rebuilt from the annotations, 7,602 pairs", ("long-dci",)),
    "long-dci-debias": Protocol("DeBias-CLIP's own Long-DCI, not the 7,602 pairs: 2 points lower", (), ("long-dci",)),
    "long-dci-hyfl": Protocol("HyFL-CLIP's Long-DCI, its captions not stated", (), ("long-dci",)),
    "iiw-lotlip": Protocol("captions cut at full stops and re-joined, 612 pairs (LoTLIP)", (), ("iiw", "iiw-400")),
    "sharegpt4v-1k": Protocol("the first 1,000 records", ("sharegpt4v-1k",)),
    "sharegpt4v-10k": Protocol("the first 10,000 records, 9,000 of them training data", (), ("sharegpt4v-1k",)),
    "coco": Protocol("val2017, all 25,014 captions", ("coco",), _COCO),
    "coco-first5": Protocol("val2017, the first 5 captions of each picture", ("coco-first5",), _COCO),
    "coco-val2017": Protocol("val2017, 25,000 or 25,014 captions (0.04 point apart at most)", _COCO),
    "flickr30k": Protocol("Karpathy's train, val and test: 31,014 pictures", ("flickr30k",), _FLICKR),
    "flickr30k-raw": Protocol("all 31,783 pictures", ("flickr30k-raw",), _FLICKR),
    "flickr30k-1k": Protocol("Karpathy's test split: 1,000 pictures", ("flickr30k-1k",), _FLICKR),
    "flickr30k-unstated": Protocol("the full set, 31,014 or 31,783 pictures: not stated which", (), _FLICKR),
}

COMPLETE: dict[str, tuple[int, int]] = {
    "urban1k": (1000, 1000),
    "dci": (7805, 7805),
    "dci-split": (7805, 7805),
    "long-dci": (7602, 7602),
    "docci": (5000, 5000),
    "iiw-400": (400, 400),
    "iiw": (612, 612),
    "sharegpt4v-1k": (1000, 1000),
    "coco": (5000, 25014),
    "coco-first5": (5000, 25000),
    "flickr30k": (31014, 155070),
    "flickr30k-raw": (31783, 158915),
    "flickr30k-1k": (1000, 5000),
}
"""Images and captions of each whole benchmark: a part of a set is easier than the whole."""

_TABLE_3 = "DeBias-CLIP, table 3 (arXiv 2602.22419)"
_TABLE_4 = "DeBias-CLIP, table 4 (arXiv 2602.22419)"
_SAID_AMP = "SAID's re-run of the released weights, mixed precision"
_SAID_32 = "SAID's re-run of the released weights, float32"
_HYFL = "HyFL-CLIP (arXiv 2607.00428)"
_LOTLIP = "LoTLIP, README"
_HANCLIP = "HANCLIP's re-evaluation"
_WIZ = "wizwand.com, from DeBias-CLIP v1"

Scores = dict[str, tuple[float | None, float | None]]

# (source, protocol, {model: (text to image, image to text)})
_T2I_FIRST: tuple[tuple[str, str, Scores], ...] = (
    (_TABLE_3, "urban1k", {
        "CLIP B/16": (53.4, 67.5), "Long-CLIP B/16": (79.5, 78.9), "SmartCLIP B/16": (87.4, 90.0),
        "DeBias-CLIP B/16": (93.0, 93.1), "CLIP L/14": (56.1, 68.5), "Long-CLIP L/14": (86.0, 82.5),
        "SmartCLIP L/14": (90.1, 93.3), "DeBias-CLIP L/14": (95.2, 95.2)}),
    (_TABLE_3, "dci", {
        "CLIP B/16": (42.9, 44.1), "Long-CLIP B/16": (57.1, 51.6), "SmartCLIP B/16": (64.0, 64.9),
        "DeBias-CLIP B/16": (67.6, 68.5), "CLIP L/14": (43.8, 44.8), "Long-CLIP L/14": (63.9, 57.0),
        "SmartCLIP L/14": (69.8, 68.2), "DeBias-CLIP L/14": (73.5, 72.8)}),
    (_TABLE_3, "long-dci-debias", {
        "CLIP B/16": (32.7, 35.9), "Long-CLIP B/16": (47.0, 41.1), "SmartCLIP B/16": (52.8, 53.4),
        "DeBias-CLIP B/16": (57.4, 57.8)}),
    (_TABLE_3, "docci", {
        "CLIP B/16": (57.1, 60.6), "Long-CLIP B/16": (71.4, 63.1), "SmartCLIP B/16": (78.0, 77.4),
        "DeBias-CLIP B/16": (80.0, 79.7), "CLIP L/14": (63.0, 65.8), "Long-CLIP L/14": (78.6, 66.5),
        "SmartCLIP L/14": (82.5, 81.6), "DeBias-CLIP L/14": (85.6, 85.2)}),
    (_TABLE_4, "coco", {
        "Long-CLIP B/16": (40.4, 57.6), "SmartCLIP B/16": (42.4, 61.9), "DeBias-CLIP B/16": (43.0, 61.3)}),
    (_TABLE_4, "flickr30k", {
        "CLIP B/16": (None, 44.1), "Long-CLIP B/16": (34.1, 46.8), "SmartCLIP B/16": (36.3, 55.6)}),
    (f"{_TABLE_4}, v1", "flickr30k", {"DeBias-CLIP B/16": (36.9, 57.0)}),
    (f"{_TABLE_4}, v2", "flickr30k", {"DeBias-CLIP B/16": (36.6, 56.6)}),
    ("Long-CLIP, model zoo", "flickr30k-raw", {"CLIP B/16": (24.7, None)}),
    (_WIZ, "coco", {"DeBias-CLIP L/14": (48.1, 65.1)}),
    (_WIZ, "flickr30k", {"DeBias-CLIP L/14": (43.9, 64.8)}),
    (_SAID_AMP, "coco", {"DeBias-CLIP B/16": (42.95, 61.30)}),
    (_SAID_AMP, "flickr30k", {"DeBias-CLIP B/16": (36.60, 56.62)}),
    (_SAID_AMP, "urban1k", {"DeBias-CLIP B/16": (93.00, 93.30)}),
    (_SAID_AMP, "docci", {"DeBias-CLIP B/16": (79.96, 79.62)}),
    (_SAID_AMP, "dci", {"DeBias-CLIP B/16": (67.47, 68.47)}),
    (_SAID_32, "coco-first5", {"DeBias-CLIP B/16": (42.95, 61.34)}),
    (_SAID_32, "flickr30k-1k", {"DeBias-CLIP B/16": (73.60, 89.80)}),
    (_SAID_32, "urban1k", {"DeBias-CLIP B/16": (93.10, 93.30)}),
    (_SAID_32, "docci", {"DeBias-CLIP B/16": (79.92, 79.66)}),
    (_SAID_32, "long-dci", {"DeBias-CLIP B/16": (59.17, 59.43)}),
    (_HYFL, "long-dci-hyfl", {"SmartCLIP L/14": (58.5, 57.6)}),
    ("FLAIR, merged 30M", "coco", {"FLAIR": (53.3, 68.0)}),
    ("FLAIR, merged 30M", "flickr30k-1k", {"FLAIR": (81.1, 94.7)}),
)  # fmt: skip

# (source, protocol, {model: (image to text, text to image)}), the order in which these were printed
_I2T_FIRST: tuple[tuple[str, str, Scores], ...] = (
    (_HYFL, "docci", {
        "Long-CLIP B/16": (63.10, 71.49), "HiMo-CLIP B/16": (77.37, 79.35), "FineLIP B/16": (77.16, 79.14),
        "HyFL-CLIP B/16": (78.41, 81.12), "Long-CLIP L/14": (66.78, 78.61), "TULIP L/14": (77.90, 79.10),
        "HiMo-CLIP L/14": (82.35, 84.59), "FineLIP L/14": (82.20, 83.10), "HyFL-CLIP L/14": (82.12, 85.39)}),
    (_HYFL, "dci-hyfl", {
        "Long-CLIP B/16": (59.88, 61.28), "HiMo-CLIP B/16": (71.09, 69.93), "FineLIP B/16": (69.38, 68.03),
        "Fix-CLIP B/16": (59.70, 63.00), "HyFL-CLIP B/16": (71.54, 71.79), "Long-CLIP L/14": (64.13, 67.83),
        "HiMo-CLIP L/14": (74.59, 74.54), "Fix-CLIP L/14": (65.10, 66.70), "HyFL-CLIP L/14": (74.74, 76.19)}),
    (_HYFL, "long-dci-hyfl", {
        "Long-CLIP B/16": (42.21, 48.38), "TULIP B/16": (50.20, 50.60), "HiMo-CLIP B/16": (58.59, 57.00),
        "FineLIP B/16": (57.18, 55.22), "HyFL-CLIP B/16": (59.00, 58.75), "Long-CLIP L/14": (46.55, 54.25),
        "TULIP L/14": (55.70, 56.40), "HiMo-CLIP L/14": (62.06, 61.94), "FineLIP L/14": (60.80, 60.70),
        "HyFL-CLIP L/14": (61.92, 63.93)}),
    (_HYFL, "urban1k", {
        "Long-CLIP B/16": (79.40, 79.60), "TULIP B/16": (88.10, 86.60), "HiMo-CLIP B/16": (89.20, 89.20),
        "FineLIP B/16": (89.30, 86.90), "LongD-CLIP B/16": (87.20, 87.30), "Fix-CLIP B/16": (80.90, 81.10),
        "HyFL-CLIP B/16": (91.80, 91.10), "Long-CLIP L/14": (82.40, 86.20), "TULIP L/14": (90.10, 91.10),
        "HiMo-CLIP L/14": (93.00, 93.20), "FineLIP L/14": (93.20, 93.00), "LongD-CLIP L/14": (91.90, 90.80),
        "Fix-CLIP L/14": (86.80, 87.70), "HyFL-CLIP L/14": (94.60, 94.30)}),
    (_LOTLIP, "dci-lotlip", {
        "CLIP B/16": (45.45, 43.01), "Long-CLIP B/16": (51.68, 57.28), "LoTLIP B/16": (64.11, 62.63)}),
    (_LOTLIP, "iiw-lotlip", {
        "CLIP B/16": (88.24, 87.58), "Long-CLIP B/16": (89.61, 93.20), "LoTLIP B/16": (94.28, 92.65)}),
    (_LOTLIP, "sharegpt4v-10k", {
        "CLIP B/16": (60.22, 56.16), "Long-CLIP B/16": (79.24, 77.06), "LoTLIP B/16": (88.40, 82.72)}),
    (_LOTLIP, "urban1k-lotlip", {
        "CLIP B/16": (67.1, 52.9), "Long-CLIP B/16": (78.9, 79.5), "LoTLIP B/16": (88.8, 84.8)}),
    (_HANCLIP, "coco-val2017", {
        "CLIP B/16": (51.7, 32.7), "Long-CLIP B/16": (57.3, 40.4), "Long-CLIP L/14": (62.9, 46.3),
        "SmartCLIP B/16": (61.9, 42.4), "SmartCLIP L/14": (66.1, 48.4), "HiMo-CLIP L/14": (65.1, 47.1)}),
    (_HANCLIP, "flickr30k-unstated", {
        "CLIP B/16": (43.3, 24.7), "Long-CLIP B/16": (47.2, 33.2), "Long-CLIP L/14": (53.5, 41.3),
        "SmartCLIP B/16": (55.6, 36.3), "SmartCLIP L/14": (64.0, 43.8), "HiMo-CLIP L/14": (57.7, 42.5)}),
    (_HANCLIP, "urban1k", {
        "CLIP B/16": (67.5, 53.3), "Long-CLIP B/16": (79.3, 79.4), "Long-CLIP L/14": (82.5, 86.1),
        "SmartCLIP B/16": (90.5, 87.3), "SmartCLIP L/14": (93.3, 90.1), "HiMo-CLIP L/14": (93.0, 93.0)}),
    (_HANCLIP, "sharegpt4v-1k", {
        "CLIP B/16": (84.5, 79.6), "Long-CLIP B/16": (94.8, 93.3), "Long-CLIP L/14": (97.2, 97.3),
        "SmartCLIP B/16": (98.7, 98.1), "SmartCLIP L/14": (97.9, 98.5), "HiMo-CLIP L/14": (99.5, 99.0)}),
)  # fmt: skip

PUBLISHED: tuple[Published, ...] = (
    *(Published(model, tag, t2i, i2t, src) for src, tag, rows in _T2I_FIRST for model, (t2i, i2t) in rows.items()),
    *(Published(model, tag, t2i, i2t, src) for src, tag, rows in _I2T_FIRST for model, (i2t, t2i) in rows.items()),
)


def published_rows(benchmark: str, counts: Mapping[str, int]) -> list[tuple[Published, str]]:
    """The published rows that carry a benchmark's name, each with the reason why it must not be compared with ours, ""
    where it may be.

    `counts` are the retrieval set's own: beside a part of a benchmark no published row is comparable.
    """
    incomplete = why_incomplete(benchmark, counts)
    rows = []
    for row in PUBLISHED:
        protocol = PROTOCOLS[row.protocol]
        if benchmark in protocol.comparable:
            rows.append((row, incomplete))
        elif benchmark in protocol.related:
            rows.append((row, protocol.text))
    return rows


def why_incomplete(benchmark: str, counts: Mapping[str, int]) -> str:
    """What the whole benchmark has and this copy has not, or "" where it is whole or not one of `COMPLETE`."""
    here = counts["images"], counts["captions"]
    whole = COMPLETE.get(benchmark, here)
    if here == whole:
        return ""
    return f"measured on all {whole[0]:,} pictures and {whole[1]:,} captions; this copy has {here[0]:,} and {here[1]:,}"
