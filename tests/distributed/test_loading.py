"""Two ranks at ZeRO-3 start from every kind of model alike, and neither ever holds a whole one beside its share."""

import json
from pathlib import Path

import llavas
import pytest
import toys
from launching import ROOT, launch

MEASURE = ROOT / "tests" / "workers" / "measure_loading.py"
SHARDS = 4
LARGE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6, "vocab_size": 6000}


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> tuple[int, dict[str, list[dict[str, int]]]]:
    """(bytes of the model, what each rank measured by the kind of its files)."""
    folder = tmp_path_factory.mktemp("memory")
    base = toys.write_base(folder / "base", **LARGE)
    model = llavas.hf_model(base)
    cases = {
        "first": toys.write_base(folder / "small"),
        "safetensors": llavas.write_llava(folder / "safetensors", base, model, shards=SHARDS),
        "bin": llavas.write_llava(folder / "bin", base, model, suffix=".bin", shards=SHARDS),
        "rows": {**llavas.write_llava(folder / "rows", base, model, shards=SHARDS), "mm_use_im_start_end": True},
    }
    size = sum(file.stat().st_size for file in Path(cases["safetensors"]["model_name_or_path"]).glob("*.safetensors"))
    del model
    listed = folder / "cases.json"
    listed.write_text(json.dumps({"cases": cases, "out": str(folder)}))
    done = launch(2, MEASURE, str(listed))
    assert done.returncode == 0, done.stdout + done.stderr
    return size, {name: [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in (0, 1)] for name in cases}


@pytest.mark.parametrize("kind", ["safetensors", "bin", "rows"])
def test_no_rank_holds_more_than_a_shard_beside_its_share(measured, kind):
    size, ranks = measured[0], measured[1][kind]
    assert size > 300e6
    for found in ranks:
        assert 0.4 * size < found["share"] < 0.51 * size  # of all rows, or of those that the tokenizer has
        assert found["left"] < found["share"] + 0.1 * size, found
        assert found["anonymous"] < found["share"] + size / SHARDS, found
        assert found["resident"] < found["share"] + size / SHARDS + 0.1 * size, found
