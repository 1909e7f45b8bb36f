"""The embedded default: generated scenes of coloured shapes, and tiny base weights that were trained separately."""

from pathlib import Path

WEIGHTS_PATH = Path(__file__).parent / "weights"
CLIP_PATH = WEIGHTS_PATH / "clip"
LLAMA_PATH = WEIGHTS_PATH / "llama"
