"""The embedded default: generated scenes of coloured shapes, and tiny base weights that never met each other."""

from pathlib import Path

WEIGHTS_PATH = Path(__file__).parent / "weights"
CLIP_PATH = WEIGHTS_PATH / "clip"
LLAMA_PATH = WEIGHTS_PATH / "llama"
