"""--tf32: both libraries' switches, by both of their names, and what their rounding does to a tower."""

import pytest
import torch

from llava_ds.extensions.infer import engines
from llava_ds.runtime.tf32 import allow_tf32, exact_fp32, tf32_allowed
from llava_ds.train import start


class StopHere(Exception):
    pass


def switches() -> tuple:
    """All that code asks; torch raises where the names contradict each other."""
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    assert {cuda.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision} <= {"tf32", "ieee"}
    assert cuda.allow_tf32 == (torch.get_float32_matmul_precision() == "high") == (cuda.fp32_precision == "tf32")
    assert cudnn.allow_tf32 == (cudnn.conv.fp32_precision == "tf32") == (cudnn.rnn.fp32_precision == "tf32")
    return cuda.allow_tf32, cudnn.allow_tf32


@pytest.fixture(autouse=True)
def off_afterwards():
    yield
    allow_tf32(False)


@pytest.mark.parametrize("allowed", [True, False, True])
def test_both_switches_by_both_names(allowed):
    allow_tf32(allowed)
    assert switches() == (allowed, allowed) and tf32_allowed() == allowed
    with exact_fp32():
        assert switches() == (False, False) and not tf32_allowed()
    assert switches() == (allowed, allowed)


def test_exact_fp32_ends_with_an_error_too():
    allow_tf32(True)
    with pytest.raises(StopHere), exact_fp32():
        raise StopHere
    assert switches() == (True, True)


def test_compiling_reads_them_without_an_error():
    """torch.compile asks by the older names, for which torch has errors if only the newer ones were set."""
    allow_tf32(True)
    assert torch.compile(lambda x: x * 2, backend="aot_eager")(torch.ones(2)).tolist() == [2, 2]


@pytest.mark.parametrize("allowed", [True, False])
def test_training_sets_them_before_it_joins_the_others(monkeypatch, tmp_path, allowed):
    def join():
        raise StopHere

    allow_tf32(not allowed)
    monkeypatch.setattr(start, "init_ranks", join)
    lock = type("Lock", (), {"take_early": lambda *_: None})()
    with pytest.raises(StopHere):
        argv = ["--output_dir", str(tmp_path / "out"), "--cache_dir", str(tmp_path), "--tf32", str(allowed)]
        start.start([*argv, "--deepspeed_config", "ds_configs/zero2.json"], lock, None)
    assert switches() == (allowed, allowed)


def test_inference_is_without(monkeypatch):
    """Of run/evaluate.py and run/chat.py: torch's default would compute a tower's convolution with it."""
    allow_tf32(True)
    monkeypatch.setattr(engines, "load_model", lambda *_, **__: switches())
    monkeypatch.setattr(engines, "with_variables", lambda loaded, _: loaded)
    assert engines.load_for_inference("anywhere", engines.EngineOptions()) == (False, False)
