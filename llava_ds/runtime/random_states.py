"""The states of a rank's random number generators, as checkpoints store them."""

import random

import numpy as np
import torch

from llava_ds.constants import DataError


def random_states(device: torch.device) -> dict[str, object]:
    """Return the generators' states as numbers and tensors, because these load without running pickled code."""
    name, keys, *rest = np.random.get_state()
    states = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: dict[str, object], device: torch.device) -> None:
    """Set the generators' states. A GPU's generator is unchanged if the states were saved on a CPU.

    states: from random_states. Raises DataError if they are malformed.
    """
    try:
        version, words, gauss = states["python"]
        random.setstate((version, tuple(words), gauss))
        name, keys, *rest = states["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
        torch.set_rng_state(states["torch"])
        if device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], device)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise DataError(f"it has no random states: {type(error).__name__}: {error}"[:300]) from error


def seed_random_states(seed: int, step: int, rank: int) -> None:
    """Seed the generators of a rank without saved states, identically at every resume from this step."""
    words = np.random.SeedSequence([seed, step, rank]).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(words[1])
    torch.manual_seed(int(words[2]))  # seeds all devices
