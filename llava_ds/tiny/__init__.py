"""The default model and data: tiny base weights in this package, and generated scenes of coloured shapes."""

from pathlib import Path

WEIGHTS_PATH = Path(__file__).parent / "weights"
CLIP_PATH = WEIGHTS_PATH / "clip"
LLAMA_PATH = WEIGHTS_PATH / "llama"
