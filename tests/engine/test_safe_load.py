"""Files of a checkpoint are read; code that somebody put into one is refused with its name and does not run."""

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum

from llava_ds.constants import DataError
from llava_ds.engine.shards import safe_load

CONTENT = {
    "weight": torch.arange(6.0).view(2, 3).bfloat16(),
    "stage": ZeroStageEnum.weights,
    "scaler": DynamicLossScaler(2**16, 2.0, 1000, 1.0, 2, False),
    "shapes": {"a": torch.Size([2, 3])},
    "numbers": [1, 2.5, None, True, "text", (3, 4)],
}


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def check(found: dict) -> None:
    assert torch.equal(found["weight"], CONTENT["weight"]) and found["scaler"].cur_scale == 2**16
    assert {key: found[key] for key in ("stage", "shapes", "numbers")} == {
        key: CONTENT[key] for key in ("stage", "shapes", "numbers")
    }


@pytest.mark.parametrize("zipped", [True, False])
def test_what_deepspeed_writes_is_read(zipped, tmp_path):
    torch.save(CONTENT, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    check(safe_load.load(tmp_path / "a.pt", mmap=True))
    with safe_load.without_code(tmp_path):
        check(TorchCheckpointEngine().load(str(tmp_path / "a.pt")))


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("by_deepspeed", [True, False])
def test_code_is_refused_and_not_run(by_deepspeed, zipped, tmp_path):
    file = tmp_path / "a.pt"
    torch.save({**CONTENT, "x": Evil(tmp_path / "ran")}, file, _use_new_zipfile_serialization=zipped)
    with pytest.raises(DataError, match=r"a.pt is refused: it holds \S*system") as caught:
        if by_deepspeed:
            with safe_load.without_code(file):
                TorchCheckpointEngine().load(str(file))
        else:
            safe_load.load(file)
    assert not (tmp_path / "ran").exists() and "\n" not in str(caught.value)
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ


@pytest.mark.parametrize("content", [b"", b"<html>", pickle.dumps({"a": 1})[:-3], b"PK\x03\x04 cut"])
def test_a_damaged_file_is_named(content, tmp_path):
    (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(DataError, match=r"a.pt can't be read"):
        safe_load.load(tmp_path / "a.pt")
    with pytest.raises(DataError, match=r"b.pt can't be read"):
        safe_load.load(tmp_path / "b.pt")


def test_deepspeeds_own_errors_stay_what_they_are(tmp_path):
    with pytest.raises(KeyError), safe_load.without_code(tmp_path):
        json.loads("{}")["no such key"]
