"""The results file: what was measured, on what, with which versions."""

import hashlib
import json
import platform
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from debias_diffusion.data.feature_cache import FeatureCache
from debias_diffusion.data.retrieval_set import PictureFile, RetrievalSet
from debias_diffusion.encoders.encoder import Encoder
from debias_diffusion.evaluation.attention import AttentionProfile
from debias_diffusion.evaluation.depth import DepthCurve
from debias_diffusion.evaluation.runner import Result, compare_encoders

SCHEMA = 1

_LIBRARIES = ("torch", "torchvision", "open_clip_torch", "nupunkt", "ftfy", "pillow")

Content = dict[str, Any]


def encoder_record(encoder: Encoder, source: str, cache: FeatureCache) -> dict[str, Any]:
    """Which encoder it was, weights and all."""
    return {
        "source": source,
        "weights_hash": {"image": cache.tower_hash(encoder, "visual"), "text": cache.tower_hash(encoder, "text")},
        "context_length": encoder.context_length,
        "history": encoder.history,
    }


def header(job: str, encoders: Sequence[str], flags: Mapping[str, Any]) -> dict[str, Any]:
    """What every file opens with: its schema, the command that makes it again, versions, the time in UTC."""
    words = ["debias-diffusion", job, *encoders]
    for name, value in flags.items():
        if value is not None:
            words += [f"--{name}", *(value if isinstance(value, tuple) else [str(value)])]
    return {
        "schema": SCHEMA,
        "command": shlex.join(words),
        "versions": {
            "debias-diffusion": version("debias-diffusion"),
            "python": platform.python_version(),
            **{library: version(library) for library in _LIBRARIES},
        },
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def benchmark_record(retrieval_set: RetrievalSet, results: dict[str, dict[str, Result]], seed: int) -> dict[str, Any]:
    """One benchmark: `counts` are of what was measured, so without unreadable pictures and their captions."""
    any_result = next(iter(next(iter(results.values())).values()))
    counts = {
        **retrieval_set.counts,
        "images": len(any_result.ranks.i2t),
        "captions": len(any_result.ranks.t2i),
        "unreadable_pictures": len(any_result.unreadable),
        "captions_of_unreadable": any_result.dropped,
    }
    return {
        "protocol": retrieval_set.protocol,
        "counts": counts,
        "digest": content_digest(retrieval_set),
        "unreadable": list(any_result.unreadable.values()),
        "results": {
            encoder: {name: result.to_row() for name, result in rows.items()} for encoder, rows in results.items()
        },
        "comparisons": compare_encoders(results, seed=seed),
    }


def content_digest(retrieval_set: RetrievalSet) -> str:
    """A hash of what was asked, wherever it lies: captions, whose they are, and pictures, a file's by its size."""
    pictures = [
        (picture.path.stat().st_size if picture.path.exists() else None)
        if isinstance(picture, PictureFile)
        else picture.identity
        for picture in retrieval_set.pictures
    ]
    content = [retrieval_set.captions, retrieval_set.image_of_caption, retrieval_set.short_captions, pictures]
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()


def attention_record(profile: AttentionProfile, curve: DepthCurve) -> dict[str, Any]:
    """The JSON form of where an encoder looks; shares are 0 to 1, recalls in percent."""
    return {
        "first_sentence_share": profile.first_sentence_share,
        "first_sentence_tokens": profile.first_sentence_tokens,
        "captions": profile.num_captions,
        "captions_without_text": profile.num_empty,
        "captions_cut": profile.num_cut,
        "by_layer": profile.by_layer.tolist(),
        "counts": profile.counts.tolist(),
        "by_sentence": profile.by_sentence.tolist(),
        "sentence_tokens": profile.sentence_tokens.tolist(),
        "places": [asdict(row) for row in curve.places],
        "depths": [asdict(row) for row in curve.bins],
        "worst_recall": curve.worst_recall,
        "spread": curve.spread,
        "min_queries": curve.min_queries,
    }


def read_results(path: Path) -> Content:
    """A results file's content; raises ValueError or FileNotFoundError where it is none."""
    if path.is_dir():
        path = path / "results.json"
    if not path.is_file():
        raise FileNotFoundError(f"no results at {path}; expected a results.json that `evaluate` wrote")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}); expected a results.json that `evaluate` wrote") from error
    if names := _encoders_of_demo(content):
        there = [str(path.parent / name) for name in names if (path.parent / name).is_dir()] or names
        raise ValueError(
            f"{path} is the demo's table, not what `evaluate` wrote; measure its encoders first, by "
            f"debias-diffusion evaluate {shlex.join(there)} --output DIR, and compare DIR"
        )
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"{path} has schema {schema!r}, expected {SCHEMA}; evaluate again with this version")
    benchmarks = content.get("benchmarks")
    if not isinstance(benchmarks, dict) or not all(
        isinstance(b, dict) and {"counts", "protocol", "results"} <= b.keys() for b in benchmarks.values()
    ):
        raise ValueError(f"{path} holds no whole benchmarks; expected a results.json that `evaluate` wrote")
    return content


def _encoders_of_demo(content: Any) -> list[str]:
    """The encoders in a table {encoder: {perturbation: {metric: percent}}}, as the demo writes it; else none."""
    if not isinstance(content, dict) or not content:
        return []
    is_table = all(isinstance(row, dict) and "t2i_recall@1" in (row.get("none") or ()) for row in content.values())
    return list(content) if is_table else []
