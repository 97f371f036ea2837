"""Fixtures shared by all tests: real data where it is present, and small real models built offline."""

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real captions, pictures and golden numbers beside the checkout; skips where it is absent."""
    if not SHARED.is_dir():
        pytest.skip("the shared data folder is not beside this checkout")
    return SHARED
