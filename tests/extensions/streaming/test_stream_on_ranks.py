"""--stream in real runs: they begin before the encoding has ended, with the losses and books of a whole cache."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import toys
from launching import command_line, ds_config, environment, launch, losses, toy_run

from llava_ds.runtime.launchers import free_port

WORKER = Path(__file__).parent / "streaming_worker.py"
SHARD = 16  # records


def write_given(folder: Path, number: int, bad: int = 13, kinds: str = "it") -> dict[str, str]:
    """A toy model, and data of which every so many records can't be used."""
    data = toys.write_data(folder / "data", kinds * (number // len(kinds)))
    records = json.loads(Path(data["data_path"]).read_text())
    for record in records[5::bad] if bad else ():
        record["conversations"] = "none"
    Path(data["data_path"]).write_text(json.dumps(records))
    return toys.write_base(folder / "base") | data


def stream_run(given: dict[str, str], output_dir: Path, **more: object) -> dict[str, object]:
    common = {"stream": True, "shuffle_buffer_size": 2 * SHARD, "max_bad_fraction": 0.2, "preprocessing_num_workers": 1}
    return toy_run(given, output_dir, ds_config(2), **{**common, "train_batch_size": 8, "logging_steps": 1, **more})


def books(output_dir: Path) -> tuple[dict, list[dict]]:
    """What the run says of its data, and of what it left out."""
    skipped = [json.loads(line) for line in (output_dir / "run" / "skipped.jsonl").read_text().splitlines()]
    return json.loads((output_dir / "run" / "run.json").read_text())["data"], skipped


def eval_loss(output_dir: Path) -> float:
    return json.loads((output_dir / "run" / "evals.jsonl").read_text().splitlines()[-1])["loss"]


def wait_until(done, process: subprocess.Popen) -> None:
    while not done():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


@pytest.mark.long
def test_a_run_that_begins_with_two_shards_is_that_of_a_whole_cache(tmp_path):
    given, gate = write_given(tmp_path, 6 * SHARD), tmp_path / "gate"
    more = {"eval_fraction": 0.1, "tokens_per_micro_batch": 600}
    cold, warm = tmp_path / "cold", tmp_path / "warm"
    runs = [stream_run(given, cold, **more), stream_run(given, warm, **more)]
    (tmp_path / "runs.json").write_text(json.dumps([command_line(flags) for flags in runs]))
    gate.write_text("2")
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    variables["MASTER_PORT"] = str(free_port())
    command = [sys.executable, str(WORKER), str(SHARD), str(gate), str(tmp_path / "runs.json")]
    with subprocess.Popen(
        command, env=environment() | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        # Its rows are written when two steps are done, and four of six shards can't be there.
        wait_until(lambda: (cold / "run" / "metrics.jsonl").exists() and len(losses(cold)) >= 2, process)
        [work] = (tmp_path / "cache" / "encoded").glob("*/1.work")
        assert len(list(work.glob("rows-*"))) == 2
        gate.unlink()
        output = process.communicate()[0]
    assert process.returncode == 0, output
    assert losses(cold) == losses(warm) and len(losses(cold)) == 11  # steps of the 86 records that are not held out
    assert books(cold) == books(warm)
    data, skipped = books(cold)
    rejected = [row["index"] for row in skipped]
    assert rejected == list(range(5, 6 * SHARD, 13)) and not any("step" in row for row in skipped)
    assert "89 accepted, 7 rejected" in data["summary"][1]
    assert "drawn by seed" in data["held_out"][0]
    assert eval_loss(cold) == eval_loss(warm)


@pytest.mark.long
def test_two_ranks_stream_like_the_whole_encoding(tmp_path):
    given, gate = write_given(tmp_path, 6 * SHARD, bad=0), tmp_path / "gate"
    common = {"num_train_epochs": 2, "dataloader_num_workers": 1}
    runs = {
        "cold": stream_run(given, tmp_path / "cold", **common),
        "warm": stream_run(given, tmp_path / "warm", **common),
        "cold in order": stream_run(
            given, tmp_path / "cold in order", **common, shuffle=False, cache_dir=tmp_path / "c2"
        ),
    }
    in_order = {**runs["cold in order"], "output_dir": tmp_path / "whole in order", "stream": False}
    runs["whole in order"] = {name: value for name, value in in_order.items() if name != "shuffle_buffer_size"}
    runs["whole"] = {**runs["whole in order"], "output_dir": tmp_path / "whole", "shuffle": True}
    (tmp_path / "runs.json").write_text(json.dumps([command_line(flags) for flags in runs.values()]))
    done = launch(2, WORKER, str(SHARD), str(gate), str(tmp_path / "runs.json"), timeout_s=600)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {name: losses(tmp_path / name) for name in runs}
    assert found["cold"] == found["warm"] and len(found["cold"]) == 24
    # Where no record is bad, the files' order is that of a run without --stream, to the bit.
    assert found["cold in order"] == found["whole in order"] != found["cold"]
    prints = {name: json.loads((tmp_path / name / "run" / "run.json").read_text())["data"] for name in runs}
    assert all(data == prints["whole"] for data in prints.values())


@pytest.mark.long
def test_too_many_bad_records_end_the_run_where_it_meets_them(tmp_path):
    given = write_given(tmp_path, 6 * SHARD)
    flags = stream_run(given, tmp_path / "out", max_bad_fraction=0.03)
    done = launch(2, WORKER, str(SHARD), str(tmp_path / "gate"), *command_line(flags))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "more than --on_bad_sample and --max_bad_fraction allow (2)" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    steps = [json.loads(line)["step"] for line in (tmp_path / "out" / "run" / "skipped.jsonl").read_text().splitlines()]
    assert len(steps) > 2 >= sum(step < steps[-1] for step in steps)


@pytest.mark.long
def test_a_source_that_can_t_be_read_ends_the_run_with_one_message(tmp_path):
    given = write_given(tmp_path, 40 * SHARD, bad=0, kinds="t")
    path = Path(given["data_path"])
    text = path.read_text()
    path.write_text(text[: len(text) // 2])  # behind the records that tell the format
    done = launch(2, WORKER, str(SHARD), str(tmp_path / "gate"), *command_line(stream_run(given, tmp_path / "out")))
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stdout + done.stderr
    assert f"{path}, line 1, column" in done.stderr
