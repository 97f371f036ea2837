"""A folder that one measurement fills over several calls: it goes on with the same flags, and never with others."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from debias_diffusion.evaluation.page import write_whole

SETTINGS_FILE = "settings.json"


def refuse_other_run(output: Path, flags: Mapping[str, Any], growing: Mapping[str, Any]) -> None:
    """Raises ValueError, with all that differs, where `output` holds what other flags made; see `keep_flags`.

    `growing` flags may hold more than they did: a higher number, or more entries beside those that were there. Less is
    refused once there are results, which would be lost. What was only begun may be cut down.
    """
    file, is_done = output / SETTINGS_FILE, (output / "results.json").is_file()
    if not file.is_file():
        if is_done:
            raise ValueError(
                f"{output} holds results that do not say how they were made; name another OUTPUT, or add --fresh to "
                "replace them"
            )
        return
    try:
        then = json.loads(file.read_text(encoding="utf-8"))
        before = {**then["flags"], **then["growing"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} cannot be read ({error}); name another OUTPUT, or add --fresh") from error
    changed = []
    for name, value in _plain(flags).items():
        if before.get(name) != value:
            changed.append(f"--{name} {before.get(name)} -> {value}")
    for name, value in _plain(growing).items():
        changed += _shrunk(name, before.get(name), value, is_done)
    if changed:
        raise ValueError(
            f"{output} holds a run with other flags ({', '.join(changed)}); name another OUTPUT, or add --fresh to replace it"
        )


def keep_flags(output: Path, flags: Mapping[str, Any], growing: Mapping[str, Any]) -> Path:
    """Writes down in `output` what `refuse_other_run` compares the next call with."""
    return write_whole(output / SETTINGS_FILE, json.dumps({"flags": flags, "growing": growing}, indent=1) + "\n")


def _shrunk(name: str, then: Any, now: Any, is_done: bool) -> list[str]:
    if isinstance(then, dict) and isinstance(now, dict):
        lost = {key: value for key, value in then.items() if now.get(key) != value and (is_done or key in now)}
        return [f"--{name} {key}: {value} -> {now.get(key, 'left out')}" for key, value in lost.items()][:3]
    may_be = isinstance(then, int) and isinstance(now, int) and (not is_done or then <= now)
    return [] if may_be or then == now else [f"--{name} {then} -> {now}"]


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """As they come back from JSON."""
    plain: dict[str, Any] = json.loads(json.dumps(values))
    return plain
