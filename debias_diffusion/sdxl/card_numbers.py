"""An encoder's measured numbers, out of what `evaluate` wrote, for its model card."""

import json
from pathlib import Path
from typing import Any

COLUMNS = ("t2i_recall@1", "i2t_recall@1")

Numbers = dict[str, dict[str, Any]]
"""By benchmark: `pictures`, and `rows` from perturbation to the columns' values in percent."""


def read_numbers(results: str | Path, source: str) -> Numbers:
    """The recalls of the encoder at `source` in a results.json, or in the folder that holds it.

    The encoder is the one measured under that very source or name; where it is not among several, an error lists them.
    """
    path = Path(results)
    path = path / "results.json" if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"no results at {path}; expected a results.json that `evaluate` wrote")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        sources = {name: str(about["source"]) for name, about in content["encoders"].items()}
        name = _find(sources, source, path)
        return {
            benchmark: {
                "pictures": part["counts"]["images"],
                "rows": {
                    perturbation: {column: round(float(row[column]), 1) for column in COLUMNS}
                    for perturbation, row in part["results"][name].items()
                },
            }
            for benchmark, part in content["benchmarks"].items()
        }
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no results.json that `evaluate` wrote: {type(error).__name__} {error}") from error


def numbers_section(slot: str, numbers: Numbers) -> str:
    """The numbers as Markdown, a table a benchmark.

    >>> rows = {"none": {"t2i_recall@1": 71.0, "i2t_recall@1": 68.5}}
    >>> print(numbers_section("text_encoder", {"docci": {"pictures": 5000, "rows": rows}}))
    ## Numbers of `text_encoder`
    <BLANKLINE>
    Recall@1 in percent, of the tower beside its own image tower, in float32.
    <BLANKLINE>
    | docci, 5000 pictures | t2i_recall@1 | i2t_recall@1 |
    | --- | --- | --- |
    | none | 71.0 | 68.5 |
    """
    told = "Recall@1 in percent, of the tower beside its own image tower, in float32."
    parts = [f"## Numbers of `{slot}`", told]
    for benchmark, part in numbers.items():
        lines = [f"| {benchmark}, {part['pictures']} pictures | {' | '.join(COLUMNS)} |", "| --- | --- | --- |"]
        lines += [f"| {name} | {' | '.join(str(row[c]) for c in COLUMNS)} |" for name, row in part["rows"].items()]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _find(sources: dict[str, str], source: str, path: Path) -> str:
    same = [
        name
        for name, measured in sources.items()
        if source in (name, measured) or Path(source).resolve() == Path(measured).resolve()
    ]
    if len(same) != 1:
        raise ValueError(f"{path} does not tell which numbers are those of {source}; it measured {sources}")
    return same[0]
