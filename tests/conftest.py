import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # toys and launching, shared by tests in every folder


@pytest.fixture(scope="session")
def toy_base(tmp_path_factory) -> dict[str, str]:
    """The flags that name a random language model and CLIP tower."""
    import toys

    return toys.write_base(tmp_path_factory.mktemp("toy") / "base")


@pytest.fixture(scope="session")
def tokenizer(toy_base):
    """A Llama-like tokenizer with 400 ids."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(toy_base["model_name_or_path"])
