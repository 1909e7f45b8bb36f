"""What a start decides by the device it finds."""

from types import SimpleNamespace

import pytest
import torch

from llava_ds.runtime.ranks import Ranks
from llava_ds.train import start


@pytest.mark.parametrize(
    ("device", "given", "expected"), [("cuda", [], 4), ("cpu", [], 0), ("cuda", ["1"], 1), ("cpu", ["2"], 2)]
)
def test_a_gpu_gets_four_loader_processes_where_none_are_named(monkeypatch, tmp_path, device, given, expected):
    monkeypatch.setattr(start, "init_ranks", lambda: Ranks(0, 0, 1, torch.device(device)))
    lock = SimpleNamespace(take_early=lambda folder: None, take_together=lambda folder, ranks: None)
    watchdog = SimpleNamespace(start=lambda training, ranks: None)
    flags = ["--output_dir", str(tmp_path / "out"), "--deepspeed_config", "ds_configs/zero2.json"]
    flags += ["--cache_dir", str(tmp_path), *(word for value in given for word in ("--dataloader_num_workers", value))]
    assert start.start(flags, lock, watchdog).args.data.dataloader_num_workers == expected
