"""--torch_compile with inductor, which writes C++ on a CPU: the same training, and after some steps no compiling."""

import shutil

import pytest
import toys
from launching import ds_config, losses, run_many, toy_run

STEPS = 8
MOST_RECOMPILED = 4  # in steps that all have other lengths: for gradients or none, and for a batch of a single tile


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler")
def test_inductor_trains_the_same_and_stops_compiling(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_LOGS", "recompiles")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    base = toys.write_base(tmp_path / "base", num_hidden_layers=3)
    given = base | toys.write_data(tmp_path / "data", "itiitittiitit" * 3)
    runs = {"plain": {}, "compiled": {"torch_compile": True}}
    todo = [toy_run(given, tmp_path / name, ds_config(0), max_steps=STEPS, **more) for name, more in runs.items()]
    said = run_many(1, tmp_path / "launch", todo, timeout_s=1500)
    plain, compiled = (losses(tmp_path / name) for name in runs)
    assert len(plain) == STEPS and plain[0] - plain[-1] > 1
    assert compiled == pytest.approx(plain, rel=1e-5)
    assert "5 layers are compiled when they first run" in said
    assert said.count("reloaded with transformers, logits differ by") == 2
    assert 1 <= said.count("Recompiling function") <= MOST_RECOMPILED, said  # at least one, or it is not logged
    behind = said[said.index(f" {STEPS}/{STEPS} [", said.index("Recompiling function")) :]  # the export's check
    assert "Recompiling function" not in behind, behind
