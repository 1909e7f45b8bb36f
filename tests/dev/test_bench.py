"""The bench: its statistics, the order of its runs, its table, what it refuses, and both of its ends in small."""

import json
import sys
from dataclasses import replace

import pytest
import torch
from benchmark import comparison, workload
from benchmark.comparison import OURS, PADDED, Run
from benchmark.hf_trainer import PaddingCollator
from benchmark.measured_run import draw, idle_of
from benchmark.preset import LLAVA_7B, TOY
from benchmark.table import Row, Spread, markdown
from launching import ROOT, environment

from llava_ds.constants import ConfigError
from llava_ds.model.open.weights import WeightFiles


def run(side: str, number: int, seconds: list[float], loss=(2.0, 1.5), grad_norm=(1.0, 0.5)) -> Run:
    return Run(side, number, seconds, list(loss), list(grad_norm), gemm_flops_per_rank=10.0, peak_memory_bytes=1,
               cpu_time_s=[2 * each for each in seconds[::-1]])  # fmt: skip


def test_every_side_runs_once_a_round_and_each_is_first_in_turn():
    order = comparison.turns(("a", "b", "c"), 3)
    assert [side for _, side in order] == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert {(number, side) for number, side in order} == {(n, s) for n in range(3) for s in "abc"}


def test_ratios_are_of_one_round_and_leave_warming_up_out():
    runs = [run(OURS, 0, [9.0, 1.0]), run(PADDED, 0, [1.0, 3.0]), run(PADDED, 1, [1.0, 8.0]), run(OURS, 1, [9.0, 2.0])]
    assert comparison.ratios(runs, PADDED, warm_up=1) == [3.0, 4.0]
    assert comparison.ratios(runs, PADDED, warm_up=1, of_cpu=True) == [1 / 9, 1 / 9]
    # 40 FLOPs in a second (and in two) on two ranks that could have done 20.
    assert comparison.fractions_of_peak(runs, OURS, [5.0, 40.0], num_ranks=2, warm_up=1) == [2.0, 1.0]


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
@pytest.mark.parametrize("wrong", [1.51, float("nan")])
def test_sides_that_train_otherwise_are_refused(name, wrong):
    first = run(OURS, 0, [1.0, 1.0], grad_norm=(2.0, 1.5))
    same = replace(first, side=PADDED, loss=[2.000001, 1.5])
    assert comparison.refuse_different([first, same], "stage 2")["loss"] == pytest.approx(5e-7)
    with pytest.raises(ConfigError, match=rf"stage 2: {name} differs by .* they do not train the same"):
        comparison.refuse_different([first, same, replace(same, **{name: [2.0, wrong]})], "stage 2")


def test_sides_of_other_lengths_are_refused():
    with pytest.raises(ConfigError, match="differ in their number of steps"):
        comparison.refuse_different([run(OURS, 0, [1.0, 1.0]), run(PADDED, 0, [1.0])], "stage 2")


def test_the_table_says_median_spread_and_what_is_asked():
    rows = [Row("stage 2", Spread.of([2.0, 1.5, 9.0]), asked=1.8), Row("tokens/s", Spread.of([1234.4]), "{:,.0f}")]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown(rows).splitlines()]
    assert lines[2:] == [["stage 2", "2.00×", "1.50× to 9.00×", "1.80×"], ["tokens/s", "1,234", "", ""]]


def test_the_shapes_are_those_of_the_models_they_stand_for():
    """Parameters of LLaVA-1.5-7B, and the output layer's part of its FLOPs."""
    tensors = hollow(LLAVA_7B)
    language_model = sum(
        t.numel() for name, t in tensors.items() if "vision_tower" not in name and "projector" not in name
    )
    assert language_model == 6_738_415_616
    assert LLAVA_7B.output_share(padded_length=1400) == pytest.approx(0.02, abs=0.002)
    assert (LLAVA_7B.features, LLAVA_7B.image_size, LLAVA_7B.scale) == (576, 336, 1.0)


def hollow(shape):
    from transformers import LlavaForConditionalGeneration

    with torch.device("meta"):
        return LlavaForConditionalGeneration(shape.config()).state_dict()


def test_a_hollow_model_takes_no_room_and_is_read_as_zeros(tmp_path):
    workload.write_hollow_model(tmp_path, replace(TOY, vocab=400_000))
    file = tmp_path / "model.safetensors"
    assert file.stat().st_size > 100e6
    assert file.stat().st_blocks * 512 < 1e6
    files = WeightFiles(str(tmp_path))
    assert set(files.shapes) == set(hollow(TOY))


def test_random_weights_are_drawn_by_kind():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
    draw(model)
    assert model[0].weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert (model[0].bias == 0).all()
    assert (model[1].weight == 1).all()


def test_idle_time_is_what_no_kernel_covers():
    class Event:
        def __init__(self, start, end, device_type):
            self.time_range, self.device_type = type("Range", (), {"start": start, "end": end}), device_type

    cuda, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    events = [Event(0, 40, cuda), Event(30, 60, cuda), Event(35, 50, cuda), Event(80, 100, cuda), Event(0, 500, cpu)]
    assert idle_of(events) == {"idle_share": pytest.approx(0.2), "kernel_seconds": pytest.approx(80e-6)}


def test_the_padded_side_sees_the_same_tokens(toy_base, tokenizer, tmp_path):
    import toys

    data = toys.encoded(**toys.write_data(tmp_path, "iit"), tokenizer=tokenizer, cache_dir=tmp_path)
    samples = [data[i] for i in range(3)]
    options = data.image_options
    batch = PaddingCollator(7, options.mean, (0.5, 0.5, 0.5))(samples)
    for i, sample in enumerate(samples):
        ids = batch["input_ids"][i][batch["attention_mask"][i] == 1]
        assert torch.equal(ids == 7, sample.input_ids < 0)
        assert torch.equal(ids[ids != 7], sample.input_ids[sample.input_ids >= 0])
        assert int((batch["labels"][i] != -100).sum()) == int((sample.labels != -100).sum())
    assert batch["pixel_values"].shape == (2, 3, options.size, options.size)


@pytest.mark.long
def test_quick_runs_end_to_end(tmp_path):
    import subprocess

    command = [sys.executable, str(ROOT / "run" / "dev" / "bench.py"), "--quick", "--only", "stage2"]
    done = subprocess.run(
        [*command, "--output_dir", str(tmp_path)], env=environment(), capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    measured = json.loads((tmp_path / "bench.json").read_text())
    assert len(measured["stage2"]) == 2
    for case in measured["stage2"].values():
        assert len(case["runs"]) == 3
        assert max(case["largest_differences"].values()) < comparison.LARGEST_DIFFERENCE
    assert (tmp_path / "table.md").read_text().count("speed-up over") == 4


@pytest.mark.long
def test_the_preset_runs_without_a_gpu_and_says_so(tmp_path):
    import subprocess

    command = [sys.executable, str(ROOT / "run" / "dev" / "bench.py"), "--preset", "gpu-7b", "--rounds", "1"]
    done = subprocess.run(
        [*command, "--output_dir", str(tmp_path)], env=environment(), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not measured" in done.stdout
    stages = json.loads((tmp_path / "bench.json").read_text())["gpu-7b"]
    assert stages["stage 1"]["mfu"] is None
    assert stages["stage 2"]["idle_share"] is None
