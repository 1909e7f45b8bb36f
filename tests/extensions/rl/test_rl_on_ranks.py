"""GRPO and PPO on real ranks: any ZeRO stage gives one run, a resumed run is the whole one, and run/rl.py starts it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import toys
from drawing_runs import KINDS, RULES, TIMES, flags_of, read_rollouts
from fake_vllm import serving
from launching import ROOT, command_line, launch, run_many
from safetensors.torch import load_file

from llava_ds.export.from_checkpoint import restore
from llava_ds.export.output_folder import folder_entries
from llava_ds.files.jsonl import read_metrics

STEPS, SAVED = 4, 2
SAVING = ("held", "critic", "adapters", "refilled", "critic-adapters")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("rl")


@pytest.fixture(scope="module")
def given(folder) -> dict[str, str]:
    (folder / "rules.py").write_text(RULES)
    return {**toys.write_base(folder / "base"), **toys.write_data(folder / "data", "iitit")}


@pytest.fixture(scope="module")
def runs(folder, given) -> dict[str, list[dict]]:
    """The rows of the log of every run."""
    saves = {"save_strategy": "steps", "save_steps": SAVED}
    todo = [
        flags_of(folder, given, f"{kind}-{stage}", stage, **more, **(saves if kind in SAVING and stage == 2 else {}))
        for kind, more in KINDS.items()
        for stage in (2, 3)
    ]
    run_many(2, folder / "launch", todo, finished=False)
    again = [(f"resumed-{kind}", kind) for kind in SAVING]
    for name, kind in [*again, ("resharded-critic", "critic")]:
        (folder / name / "run").mkdir(parents=True)
        shutil.copytree(folder / f"{kind}-2" / f"checkpoint-{SAVED}", folder / name / f"checkpoint-{SAVED}")
        shutil.copy(folder / f"{kind}-2" / "run" / "metrics.jsonl", folder / name / "run")
    todo = [flags_of(folder, given, name, 2, **KINDS[kind], **saves) for name, kind in again]
    run_many(2, folder / "again", todo, finished=False)
    todo = [flags_of(folder, given, "resharded-critic", 2, **KINDS["critic"], **saves)]
    todo.append(flags_of(folder, given, "alone-refilled", 2, **KINDS["refilled"]))
    run_many(1, folder / "resharded", todo, finished=False)
    return {path.parents[1].name: read_metrics(path) for path in folder.glob("*/run/metrics.jsonl")}


@pytest.mark.long
def test_every_stage_gives_the_same_run(runs):
    for kind in KINDS:
        assert len(runs[f"{kind}-2"]) == STEPS
        for row, other in zip(runs[f"{kind}-2"], runs[f"{kind}-3"]):
            for name in set(row) - set(TIMES):
                assert row[name] == pytest.approx(other[name], abs=2e-5, rel=2e-4), (kind, row["step"], name)


@pytest.mark.long
def test_the_first_iteration_has_every_ratio_1(runs):
    for row in runs["plain-2"]:
        assert row["clip_ratio/region_mean"] == 0.0
        assert 0 < row["sampling_gap"] < 1e-5  # drawn by transformers' attention with a cache, trained in packs
    assert runs["held-2"][0]["kl"] < runs["held-2"][-1]["kl"]  # of two iterations one has moved
    assert runs["plain-2"][0]["samples"] == 4 and runs["plain-2"][0]["reward_std"] > 0


@pytest.mark.long
@pytest.mark.parametrize("kind", SAVING)
def test_a_resumed_run_is_bit_equal(folder, runs, kind):
    whole, resumed = f"{kind}-2", f"resumed-{kind}"

    def rows(name: str) -> list[dict]:
        return [{k: v for k, v in row.items() if k not in TIMES} for row in runs[name]]

    assert rows(resumed) == rows(whole)
    end = f"checkpoint-{STEPS}"
    hashes = [json.loads((folder / name / end / "manifest.json").read_text())["files"] for name in (whole, resumed)]
    states = [{k: v for k, v in each.items() if k.endswith(".pt")} for each in hashes]
    assert states[0] and states[0] == states[1]


@pytest.mark.long
def test_a_critic_resumes_on_another_number_of_ranks(runs):
    """To rounding: one rank adds up in another order."""
    for row, other in zip(runs["critic-2"], runs["resharded-critic"], strict=True):
        for name in set(row) - set(TIMES) - {"val/clipfrac_avg"}:
            assert row[name] == pytest.approx(other[name], abs=2e-5, rel=2e-4), (row["step"], name)


@pytest.mark.long
def test_prompts_without_signal_are_replaced_the_same_on_any_number_of_ranks(runs):
    rows, alone = runs["refilled-2"], runs["alone-refilled"]
    assert 0 < sum(row["frac_resampled"] for row in rows) < len(rows)
    for row, other in zip(rows, alone, strict=True):
        for name in set(row) - set(TIMES):
            assert row[name] == pytest.approx(other[name], abs=2e-5, rel=2e-4), (row["step"], name)


@pytest.mark.long
def test_the_critic_learns_with_its_own_rate(runs):
    rows = runs["critic-2"]
    assert rows[0]["lr"] == [2e-3, 2e-3, 1e-3, 1e-3, *4 * [5e-4]]  # language model, projector, then all of the critic
    assert rows[0]["objective/kl"] == 0.0 and rows[-1]["objective/kl"] != 0.0
    assert rows[0]["val/mean"] == 0.0 and rows[-1]["val/mean"] != 0.0
    # Two updates a step: the first has every ratio 1.
    assert all(0 < row["policy/approxkl_avg"] < 1 for row in rows)


@pytest.mark.long
def test_answers_are_kept_with_their_rewards(folder, runs):
    rows = read_rollouts(folder / "resumed-held")
    assert rows == read_rollouts(folder / "held-2")[SAVED:]  # the first ones were not copied
    assert [row["step"] for row in rows] == [SAVED + 1, STEPS]
    assert sum(answer["times"] for answer in rows[0]["answers"]) == 4 and rows[0]["reference"]


@pytest.mark.long
def test_the_first_steps_say_that_nothing_is_learned(folder, given):
    """By a reward that is the same for every answer, and one that applies to none."""
    (folder / "flat.py").write_text(
        "def flat(ids, **_): return [0.25] * len(ids)\ndef none(ids, **_): return [None] * len(ids)\n"
    )
    functions = f"{folder}/flat.py:flat,{folder}/flat.py:none"
    flags = flags_of(folder, given, "flat", 2, max_steps=3, reward_funcs=functions, reward_weights="1,1")
    done = launch(2, ROOT / "run" / "rl.py", *command_line(flags))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("WARNING: nothing was learned in 3 steps: the answers to each of ") == 1
    assert "had equal rewards, like 0.25 for " in done.stdout
    for row in read_metrics(folder / "flat" / "run" / "metrics.jsonl"):
        assert (row["reward"], row["rewards/flat/mean"], row["rewards/none/mean"]) == (0.25, 0.25, 0.0)


COLUMNS = """
def half(completions, solution, level, **_):
    assert set(solution) <= {"3", None} and set(level) <= {"easy", None} and "3" in solution + ["3"]
    return [float(bool(one)) + len(text) for one, text in zip(solution, completions, strict=True)]
"""


@pytest.mark.long
def test_other_columns_of_the_records_reach_the_function(folder, given):
    """The first record has only one of the two."""
    (folder / "columns.py").write_text(COLUMNS)
    records = json.loads(Path(given["data_path"]).read_text())
    for i, record in enumerate(records):
        record |= {"solution": "3"} if i % 2 else {"level": "easy"}
    (folder / "columns.json").write_text(json.dumps(records))
    data = {**given, "data_path": str(folder / "columns.json")}
    functions = {"reward_funcs": f"{folder}/columns.py:half", "reward_weights": "1"}
    done = launch(
        1, ROOT / "run" / "rl.py", *command_line(flags_of(folder, data, "columns", 2, max_steps=1, **functions))
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert read_metrics(folder / "columns" / "run" / "metrics.jsonl")[0]["rewards/half/mean"] > 0
    done = launch(1, ROOT / "run" / "rl.py", *command_line(flags_of(folder, given, "none", 2, **functions)))
    assert "half has the parameter 'solution', but no list or column" in done.stdout + done.stderr


@pytest.mark.long
def test_a_reward_that_fails_ends_the_run_before_the_model_is_built(folder, given):
    (folder / "fails.py").write_text("def fails(completions, **_): return [1 / len(text) for text in completions]\n")
    flags = flags_of(folder, given, "fails", 2, reward_funcs=f"{folder}/fails.py:fails", reward_weights="1")
    done = launch(2, ROOT / "run" / "rl.py", *command_line(flags))
    assert done.returncode == 2 and "fails.py:fails failed: ZeroDivisionError" in done.stdout + done.stderr
    assert not (folder / "fails" / "run" / "metrics.jsonl").exists()


@pytest.mark.long
def test_the_script_starts_it_and_exports(folder, given):
    flags = flags_of(folder, given, "script", 2, max_steps=1)
    flags.pop("objective")
    done = launch(2, ROOT / "run" / "rl.py", *command_line(flags))
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "script" / "model.safetensors").is_file()


@pytest.mark.long
def test_the_actor_is_exported_without_its_critic(folder, given):
    """At the end of the run, and from its checkpoint."""
    more = {"num_generations": 1, "max_steps": 1, "save_strategy": "steps"}
    flags = flags_of(folder, given, "alone", 3, **KINDS["critic"] | more)
    done = launch(2, ROOT / "run" / "rl.py", *command_line(flags))
    assert done.returncode == 0, done.stdout + done.stderr
    exported = load_file(folder / "alone" / "model.safetensors")
    assert not any("critic" in name or "value_head" in name for name in exported)
    found = restore(folder / "alone" / "checkpoint-1", {}, None)
    written = {entry.name: entry.read() for entry in folder_entries(found.export, found.entries)}
    assert written.keys() == exported.keys()
    assert all(torch.equal(written[name], exported[name]) for name in exported)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["refilled", "critic"])
def test_bad_records_are_left_out_by_the_same_books(tmp_path, given, kind):
    """Records without an answer or an image file before training, and an image that breaks off while it trains."""
    (tmp_path / "rules.py").write_text(RULES)
    data = toys.write_data(tmp_path / "data", "iitiitt")
    file = Path(data["data_path"])
    records = json.loads(file.read_text())
    records[2]["conversations"] = []
    records[3]["image"] = "nowhere.png"
    records[5]["conversations"] = records[5]["conversations"][:1]
    file.write_text(json.dumps(records))
    torn = Path(data["image_folder"]) / "1.png"
    torn.write_bytes(torn.read_bytes()[: torn.stat().st_size // 2])
    flags = flags_of(tmp_path, {**given, **data}, "run", 2, **KINDS[kind], max_bad_fraction=0.9)
    run_many(2, tmp_path / "launch", [flags], finished=False)
    rows = read_metrics(tmp_path / "run" / "run" / "metrics.jsonl")
    assert [row["samples"] + row["broken_samples"] for row in rows] == [4] * STEPS
    assert [row["broken_samples"] for row in rows] == [1] * STEPS
    skipped = [json.loads(line) for line in (tmp_path / "run" / "run" / "skipped.jsonl").read_text().splitlines()]
    assert sorted(row["id"] for row in skipped if "step" not in row) == ["s2", "s3", "s5"]
    assert [row["step"] for row in skipped if row["id"] == "s1"] == [*range(1, STEPS + 1)]


@pytest.mark.long
@pytest.mark.parametrize("stage", [2, 3])
def test_answers_of_a_vllm_server(folder, given, stage):
    """A stand-in draws them: the run pushes its weights before every step and trains on what comes back."""
    with serving("start") as (url, stand_in):
        flags = flags_of(folder, given, f"served-{stage}", stage, vllm_server=url, dynamic_sample=True, beta=0.1)
        run_many(2, folder / f"launch-served-{stage}", [flags], finished=False)
    output = folder / f"served-{stage}"
    assert stand_in.loaded == [str(output / "vllm")] * STEPS
    assert {*load_file(output / "vllm" / "model.safetensors")} > {"language_model.lm_head.weight"}
    rows = read_metrics(output / "run" / "metrics.jsonl")
    assert len(rows) == STEPS and all(row["sampling_gap"] > 1 for row in rows)
    for prompt, _ in stand_in.asked:
        images = prompt.get("multi_modal_data", {"image": []})["image"]
        assert sum(i >= 400 for i in prompt["prompt_token_ids"]) == len(images)
