"""The evaluation commands: what to measure is checked first, then encoders are read one at a time."""

import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import OmitArgPrefixes, Positional, arg

from debias_diffusion.evaluation.page import Section, to_html, to_markdown, write_whole
from debias_diffusion.evaluation.report import (
    attention_section,
    benchmark_section,
    encoder_section,
    zero_shot_section,
)
from debias_diffusion.evaluation.results import (
    attention_record,
    benchmark_record,
    encoder_record,
    header,
    read_results,
)
from debias_diffusion.evaluation.runner import Result, check_perturbations, evaluate_encoder, readable_part
from debias_diffusion.evaluation.sources import Loading, encoder_names, load_sets, short_names

Encoders = Annotated[
    Positional[tuple[str, ...]], arg(metavar="ENCODER [ENCODER ...]", help_behavior_hint="(one or more)")
]
Root = Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="")]
Output = Annotated[Path, arg(metavar="DIR")]
SplitterName = Annotated[str, arg(metavar="{nupunkt,flair,long-clip}")]
Number = Annotated[int, arg(metavar="N")]

_PERTURBATIONS = (
    *("none", "remove_first", "swap_1_4", "move_first_to_4", "shuffle", "first_only"),
    *("first_2_filler_0", "first_2_filler_5", "first_2_filler_10", "first_2_filler_20"),
)


def evaluate(
    encoders: Encoders,
    benchmarks: Annotated[tuple[str, ...], arg(metavar="NAME [NAME ...]")] = ("miniature",),
    root: Root = None,
    perturbations: Annotated[tuple[str, ...], arg(metavar="NAME [NAME ...]")] = _PERTURBATIONS,
    output: Output = Path("runs/evaluation"),
    seed: Number = 0,
    splitter: SplitterName = "nupunkt",
    loading: OmitArgPrefixes[Loading] = Loading(),  # noqa: B008 (frozen)
) -> str:
    """Measures encoders on benchmarks, under every perturbation, into results.json, report.md and report.html.

    Args:
        encoders: Encoder folders, checkpoint files, ROW:TAG, ROW:PATH or ROW:random.
        benchmarks: What to measure on: a benchmark's name, NAME=DIR where its files lie elsewhere than in --root,
            miniature, miniature:PAIRS, manifest:FILE.jsonl.
        root: The folder that holds the benchmarks' files, or one folder for each benchmark.
        perturbations: How captions are changed: swap_1_4, remove_first, filler_5, truncate_77, short and the like; none
            is always measured.
        output: The folder the report is written to.
        seed: Seed of what perturbations draw and of the bootstrap.
        splitter: The rule that cuts captions into sentences.
        loading: How encoders are read.
    """
    names = encoder_names(encoders)
    if seed < 0:
        raise ValueError(f"seed is {seed}, expected 0 or more")
    check_perturbations(perturbations, [], splitter)
    sets = load_sets(benchmarks, root)
    check_perturbations(perturbations, sets, splitter)
    measured: dict[str, dict[str, dict[str, Result]]] = {retrieval_set.name: {} for retrieval_set in sets}
    about: dict[str, Any] = {}
    cache = loading.features()
    for name, encoder in loading.encoders(names):
        about[name] = encoder_record(encoder, names[name], cache)
        for retrieval_set in sets:
            measured[retrieval_set.name][name] = evaluate_encoder(
                encoder, retrieval_set, perturbations,
                seed=seed, splitter=splitter, cache=cache, progress=sys.stderr.isatty(),
            )  # fmt: skip
    flags = {"benchmarks": benchmarks, "root": root, "perturbations": perturbations, "seed": seed, "splitter": splitter}
    content = {
        **header("evaluate", encoders, {**flags, "quick-gelu": loading.quick_gelu, "tables": loading.tables}),
        "seed": seed,
        "splitter": splitter,
        "encoders": about,
        "benchmarks": {s.name: benchmark_record(s, measured[s.name], seed) for s in sets},
    }
    write_whole(output / "results.json", json.dumps(content, indent=1, allow_nan=False) + "\n")
    sections = [_with_figures(name, benchmark, output) for name, benchmark in content["benchmarks"].items()]
    title = f"{', '.join(names)} on {', '.join(measured)}"
    return _write_report(title, [*sections, encoder_section(content)], output)


def compare_results(
    files: Annotated[
        Positional[tuple[Path, ...]], arg(metavar="RESULTS [RESULTS ...]", help_behavior_hint="(one or more)")
    ],
) -> str:
    """Prints several results side by side, one table a benchmark, with published rows next to them.

    Args:
        files: results.json files that evaluate wrote, or the folders they lie in.
    """
    if not files:
        raise ValueError("no results to compare: name results.json files, or the folders they lie in")
    contents = {str(path.parent if path.name == "results.json" else path): read_results(path) for path in files}
    runs = {label: contents[source] for label, source in short_names(list(contents)).items()}
    merged: dict[tuple[Any, ...], dict[str, Any]] = {}
    for label, content in runs.items():
        for name, benchmark in content["benchmarks"].items():
            counts = benchmark["counts"]
            key = name, benchmark["protocol"], counts["images"], counts["captions"], benchmark.get("digest")
            group = merged.setdefault(key, {**benchmark, "results": {}, "comparisons": []})
            group["results"] |= {f"{label}: {encoder}": rows for encoder, rows in benchmark["results"].items()}
    sections = [benchmark_section(key[0], group) for key, group in merged.items()]
    several = {name for name, number in Counter(key[0] for key in merged).items() if number > 1}
    line = "These runs did not measure on one and the same {}: captions or pictures differ, so each has its own table."
    sections = [replace(s, lines=[*s.lines, line.format(s.title)]) if s.title in several else s for s in sections]
    settings = {(content["seed"], content["splitter"]) for content in runs.values()}
    if len(settings) > 1:
        line = "Seeds or sentence splitters differ between these runs: only unperturbed rows are strictly comparable."
        sections = [replace(s, lines=[*s.lines, line]) for s in sections]
    return to_markdown("", sections)


def attention(
    encoders: Encoders,
    benchmark: Annotated[str, arg(metavar="NAME")] = "miniature",
    root: Root = None,
    max_captions: Number = 500,
    max_places: Number = 8,
    output: Output = Path("runs/attention"),
    splitter: SplitterName = "nupunkt",
    loading: OmitArgPrefixes[Loading] = Loading(),  # noqa: B008 (frozen)
) -> str:
    """Measures where in the text encoders look, and how recall depends on how deep the first sentence stands.

    Args:
        encoders: Encoder folders, checkpoint files, ROW:TAG, ROW:PATH or ROW:random.
        benchmark: Whose captions are read: a benchmark's name, NAME=DIR, miniature:PAIRS or manifest:FILE.jsonl.
        root: The folder that holds the benchmark's files.
        max_captions: How many captions' attention is measured, at most.
        max_places: How many places, from the first on, the first sentence is moved to.
        output: The folder the report is written to.
        splitter: The rule that cuts captions into sentences.
        loading: How encoders are read.
    """
    from debias_diffusion.evaluation.attention import attention_profile
    from debias_diffusion.evaluation.depth import position_sensitivity
    from debias_diffusion.evaluation.figures import attention_figures, depth_figure

    names = encoder_names(encoders)
    check_perturbations([], [], splitter)
    (retrieval_set,) = load_sets([benchmark], root)
    cache, show = loading.features(), sys.stderr.isatty()
    profiles, curves = {}, {}
    for name, encoder in loading.encoders(names):
        profiles[name] = attention_profile(
            encoder, retrieval_set.captions, max_captions=max_captions, splitter=splitter, progress=show
        )
        images = cache.image_features(encoder, retrieval_set.pictures, progress=show)
        curves[name] = position_sensitivity(
            encoder, readable_part(retrieval_set, images.unreadable), max_places=max_places,
            image_features=images.features, splitter=splitter, progress=show,
        )  # fmt: skip
    flags = {"benchmark": benchmark, "root": root, "max-captions": max_captions, "max-places": max_places}
    content = {
        **header("attention", encoders, {**flags, "splitter": splitter, "tables": loading.tables}),
        "benchmark": retrieval_set.name,
        "protocol": retrieval_set.protocol,
        "counts": retrieval_set.counts,
        "encoders": {name: attention_record(profiles[name], curves[name]) for name in profiles},
    }
    write_whole(output / "attention.json", json.dumps(content, indent=1, allow_nan=False) + "\n")
    figures, by_depth = attention_figures(profiles), depth_figure(retrieval_set.name, curves)
    figures |= {"depth": by_depth} if by_depth else {}
    section = attention_section(content, _write_figures(retrieval_set.name, figures, output))
    return _write_report(f"Attention of {', '.join(names)}", [section], output)


def zero_shot(
    encoders: Encoders,
    dataset: Literal["cifar10", "cifar100", "folder"] = "folder",
    root: Root = None,
    loading: OmitArgPrefixes[Loading] = Loading(),  # noqa: B008 (frozen)
) -> str:
    """Measures zero-shot classification: the class whose name lies nearest to the picture.

    Args:
        encoders: Encoder folders, checkpoint files, ROW:TAG, ROW:PATH or ROW:random.
        dataset: CIFAR's test pictures, or a folder with one folder of pictures for each class.
        root: The folder that holds the class folders, or CIFAR's unpacked archive. Needed.
        loading: How encoders are read.
    """
    from debias_diffusion.evaluation.zero_shot import zero_shot_accuracy

    names = encoder_names(encoders)
    what = "one folder of pictures for each class" if dataset == "folder" else f"{dataset}'s unpacked archive"
    if root is None or not root.is_dir():
        missing = "--root is missing" if root is None else f"no folder at {root}"
        raise ValueError(f"{missing}: name the folder that holds {what} by --root DIR")
    rows = {
        name: zero_shot_accuracy(encoder, dataset, root, progress=sys.stderr.isatty())
        for name, encoder in loading.encoders(names)
    }
    return to_markdown("", [zero_shot_section(dataset, rows)])


def _with_figures(name: str, benchmark: dict[str, Any], output: Path) -> Section:
    from debias_diffusion.evaluation.figures import benchmark_figures

    return benchmark_section(
        name, benchmark, _write_figures(name, benchmark_figures(name, benchmark["results"]), output)
    )


def _write_figures(name: str, figures: Mapping[str, Any], output: Path) -> list[tuple[str, str]]:
    """(path relative to `output`, <svg>) of each figure, its PNG written."""
    from debias_diffusion.evaluation.figures import save_png, to_svg

    (output / "figures").mkdir(parents=True, exist_ok=True)
    written = []
    for key, figure in figures.items():
        stem = re.sub(r"[^a-z0-9]+", "-", f"{name}-{key}".lower())
        save_png(figure, output / "figures" / f"{stem}.png")
        written.append((f"figures/{stem}.png", to_svg(figure, stem)))
    return written


def _write_report(title: str, sections: Sequence[Section], output: Path) -> str:
    write_whole(output / "report.md", to_markdown(title, sections))
    page = write_whole(output / "report.html", to_html(title, sections))
    return f"{to_markdown('', sections, details=False)}\nReport: {page}, and beside it report.md, figures and numbers"
