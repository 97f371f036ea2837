"""Train, measure and use DeBias-CLIP: CLIP text encoders that read past the first sentence."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from debias_diffusion.encoders.checkpoint import load_encoder, save_encoder
    from debias_diffusion.encoders.features import image_features, text_features

__version__ = "0.1.0"
__all__ = ["__version__", "image_features", "load_encoder", "save_encoder", "text_features"]

_HOMES = {
    "load_encoder": "debias_diffusion.encoders.checkpoint",
    "save_encoder": "debias_diffusion.encoders.checkpoint",
    "text_features": "debias_diffusion.encoders.features",
    "image_features": "debias_diffusion.encoders.features",
}


def __getattr__(name: str) -> Any:
    """Imports torch only once something needs it: the package itself opens instantly."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
