"""Kept log-probabilities of the reference model are those of the model that a run starts from: the first loss is ln 2
after any change, with the numbers of the run before the change in the cache."""

import json
import math
import shutil
from pathlib import Path

import llavas
import pytest
import toys
from known_flags import needs
from launching import ds_config, losses, run_many, toy_run
from textbook_pairs import write_pairs

pytest.importorskip("peft")
pytestmark = needs("lora_enable")
LORA = {"lora_enable": True, "lora_r": 4, "lora_dropout": 0.0}
SCALED = {
    "alpha 16": {"lora_alpha": 16},
    "alpha 64": {"lora_alpha": 64},
    "root of the rank": {"lora_alpha": 16, "use_rslora": True},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """Output folders by name, of runs one after the other with one cache."""
    folder = tmp_path_factory.mktemp("reference")
    base = toys.write_base(folder / "base")
    llavas.write_hf(folder / "llava", base, llavas.hf_model(base))
    data = write_pairs(folder / "data", 8)
    other = shutil.copytree(folder / "llava", folder / "theta")
    config = json.loads((other / "config.json").read_text())
    config["text_config"]["rope_parameters"]["rope_theta"] = 40.0
    (other / "config.json").write_text(json.dumps(config))
    given = {"model_name_or_path": folder / "llava", **data, "max_steps": 1, "warmup_ratio": 0.0}
    given |= {"objective": "dpo", "train_batch_size": 8}

    def run(runs: dict[str, dict[str, object]]) -> None:
        flags = [{**toy_run(given, folder / name, ds_config(2)), **more} for name, more in runs.items()]
        run_many(1, folder / "launch", flags)

    run({"start": {**LORA, "learning_rate": 0.05, "max_steps": 3}})
    adapters = {name: with_settings(folder, name, **more) for name, more in SCALED.items()}
    changed = {
        **{name: {**LORA, "lora_weight_path": adapters[name], **SCALED[name]} for name in SCALED},
        "plain": {},
        "rope_theta": {"model_name_or_path": folder / "theta"},
        "padded": {"image_aspect_ratio": "pad"},
        "template": {"version": "llava_v1"},
    }
    run(changed)
    return {name: folder / name for name in changed}


def with_settings(folder: Path, name: str, **more: object) -> Path:
    """A copy of the first run's adapter, with other settings and the same weights."""
    copied = shutil.copytree(folder / "start", folder / f"{name} adapter")
    config = json.loads((copied / "adapter_config.json").read_text())
    (copied / "adapter_config.json").write_text(json.dumps({**config, **more}))
    return copied


def test_the_first_loss_is_ln_2_whatever_the_cache_has(runs):
    first = {name: losses(output_dir)[0] for name, output_dir in runs.items()}
    assert first == {name: pytest.approx(math.log(2), abs=1e-6) for name in runs}


def test_the_runs_differ_where_only_the_adapter_or_the_configuration_does(runs):
    """Otherwise the cache could not have been wrong."""
    chosen = {
        name: json.loads((path / "run" / "metrics.jsonl").read_text().splitlines()[0]) for name, path in runs.items()
    }
    values = {name: row["logps/chosen"] for name, row in chosen.items()}
    assert len({round(value, 3) for value in values.values()}) == len(values), values
