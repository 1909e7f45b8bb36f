"""Judged answers: scores are those of training, pairs are preferred by them, and the best of n is taken."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import toys
from exporting import export
from extension_there import if_there
from launching import ROOT
from llavas import arguments

from llava_ds.constants import ConfigError
from llava_ds.data.collate import collate
from llava_ds.data.dataset import PreflightOptions, open_encoded
from llava_ds.data.sources import SourceOptions, open_sources
from llava_ds.engine.construct import build_model
from llava_ds.extensions.benchmarks.benchmark_files import Given
from llava_ds.extensions.benchmarks.judging import BestOfN, Judge, Preferring
from llava_ds.extensions.benchmarks.llava_questions import preferences
from llava_ds.extensions.benchmarks.question import with_blank_image, without_image
from llava_ds.extensions.infer.engines import EngineOptions
from llava_ds.model.heads import LogProbs, sum_by_sample
from llava_ds.model.open.model_plan import plan_model
from llava_ds.model.open.value_head import Values, answer_ends
from llava_ds.runtime.ranks import Ranks
from llava_ds.second_models.frozen import open_frozen, plan_alone

RANKS = Ranks(0, 0, 1, torch.device("cpu"))
STAGE_0 = {"zero_optimization": {"stage": 0}}


@pytest.fixture(scope="module", params=["llava", *if_there("ready", smolvlm=0)])
def toy(request, tmp_path_factory):
    """A model with a value head and one without, in folders, and pairs, the same as training reads and as questions."""
    folder = tmp_path_factory.mktemp("judging")
    version = "v1" if request.param == "llava" else "processor"
    if version == "v1":
        args = arguments(toys.write_base(folder / "base"))
    else:
        args = arguments(pytest.importorskip("ready_models").write_ready(folder / "base", request.param))
        args = args.replaced(version=version)
    plan = plan_model(args.model, 512, value_head=True)
    images = plan.tower.image_options(args)
    model = build_model(plan, args.model, STAGE_0, torch.float32, 0, RANKS)
    torch.nn.init.normal_(model.value_head.weight)
    export(model, plan, args.model, images, folder / "scoring")
    plain = plan_model(args.model, 512)
    export(
        build_model(plain, args.model, STAGE_0, torch.float32, 0, RANKS), plain, args.model, images, folder / "plain"
    )
    data = toys.write_data(folder / "data", "iit", plain=True)
    records = json.loads(Path(data["data_path"]).read_text())
    for i, record in enumerate(records):
        answer = record["conversations"].pop()["value"]
        record |= {"kind": "abc"[i], "chosen": answer, "rejected": f"{answer} No."}
    Path(data["data_path"]).write_text(json.dumps(records))
    options = SourceOptions(image_folder=data["image_folder"], cache_dir=str(folder / "cache"), are_preferences=True)
    pairs = open_encoded(
        open_sources(data["data_path"], options),
        plan.tokenizer,
        toys.encoding_options(template=version, supervise_last_turn_only=True),
        images,
        PreflightOptions(cache_dir=str(folder / "cache")),
    )
    given = Given(data["data_path"], None, data["image_folder"], None, "exact", "together", str(folder / "cache"))
    pairs = [pairs[i] for i in range(3)]
    batches = [collate(list(pair.samples), images) for pair in pairs]
    return SimpleNamespace(
        folder=folder, model=model, pairs=pairs, batches=batches, questions=preferences(given), data=data
    )


@torch.no_grad()
def trained_scores(toy) -> list[list[float]]:
    return [toy.model(batch, Values(answer_ends(batch))).tolist() for batch in toy.batches]


def test_a_judge_scores_what_training_reads(toy):
    judge = Judge("--model_path", str(toy.folder / "scoring"), EngineOptions(), RANKS)
    texts = [[question.reference, question.more["rejected"]] for question in toy.questions]
    found = judge.scores([question.prompt for question in toy.questions], texts)
    assert judge.has_value_head
    for own, wanted in zip(found, trained_scores(toy), strict=True):
        assert own == pytest.approx(wanted, abs=1e-4)


def test_without_a_head_it_is_the_log_probability(toy):
    judge = Judge("--model_path", str(toy.folder / "plain"), EngineOptions(), RANKS)
    texts = [[question.reference, question.more["rejected"]] for question in toy.questions]
    found = judge.scores([question.prompt for question in toy.questions], texts)
    # Not toy.model, whose vocabulary lacks the folder's token for images.
    model = open_frozen(plan_alone("--model_path", str(toy.folder / "plain"), 512), torch.float32, RANKS)
    with torch.no_grad():
        wanted = [sum_by_sample(model(batch, LogProbs()), batch)[0].tolist() for batch in toy.batches]
    for own, each in zip(found, wanted, strict=True):
        assert own == pytest.approx(each, abs=1e-3)


def test_the_preferred_answer_is_the_one_with_the_higher_score(toy):
    answers = Preferring(Judge("--model_path", str(toy.folder / "scoring"), EngineOptions(), RANKS))(
        toy.questions, [0, 1, 2]
    )
    for question, answer, (chosen, rejected) in zip(toy.questions, answers, trained_scores(toy)):
        assert answer.text == (question.reference if chosen >= rejected else question.more["rejected"])
        assert answer.logprob == pytest.approx(-math.log1p(math.exp(-abs(chosen - rejected))), abs=1e-4)


def test_images_can_be_withheld(toy):
    judge = Judge("--model_path", str(toy.folder / "scoring"), EngineOptions(), RANKS)
    [first] = [question for question in toy.questions if question.kinds == ("a",)]
    [[seen]], [[blank]], [[without]] = (
        judge.scores([each.prompt], [["A red cat."]]) for each in (first, with_blank_image(first), without_image(first))
    )
    assert len({round(value, 6) for value in (seen, blank, without)}) == 3


def test_the_best_of_n_is_drawn_by_the_seed_and_chosen_by_the_judge(toy):
    judge = Judge("--reward_model_name_or_path", str(toy.folder / "scoring"), EngineOptions(), RANKS, must_score=True)
    best = {}
    for count in (1, 6):
        of = BestOfN(str(toy.folder / "plain"), judge, (count, 4, 7), EngineOptions(), RANKS)
        best[count] = of(toy.questions, [0, 1, 2])
        assert best[count] == of(toy.questions, [0, 1, 2])
        alone = of(toy.questions[2:], [2])
        assert alone[0].text == best[count][2].text
    prompts = [question.prompt for question in toy.questions]
    one, six = (judge.scores(prompts, [[answer.text] for answer in best[count]]) for count in (1, 6))
    assert all(b >= a for [a], [b] in zip(one, six)) and one != six


def test_a_judge_that_can_not_score_is_refused(toy):
    with pytest.raises(ConfigError, match=r"--reward_model_name_or_path .* has no value_head.safetensors"):
        Judge("--reward_model_name_or_path", str(toy.folder / "plain"), EngineOptions(), RANKS, must_score=True)
    with pytest.raises(ConfigError, match=r"--engine deepspeed can't judge"):
        Judge("--model_path", str(toy.folder / "plain"), EngineOptions("deepspeed"), RANKS)
    with pytest.raises(ConfigError, match=r"--model_path .* has no config.json"):
        Judge("--model_path", str(toy.folder), EngineOptions(), RANKS)


def run(monkeypatch, *words: object) -> None:
    """run/evaluate.py in this process."""
    import runpy

    monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, words)])
    runpy.run_path(str(ROOT / "run" / "evaluate.py"))["main"](sys.argv[1:])


def test_the_command_scores_pairs_with_and_without_the_image(toy, tmp_path, monkeypatch, capsys):
    output = tmp_path / "scores.json"
    data = ("--data_path", toy.data["data_path"], "--image_folder", toy.data["image_folder"])
    model = toy.folder / "scoring"
    options = ("--compare_blank_image", "--compare_without_image", "--output", output, "--cache_dir", tmp_path / "c")
    run(monkeypatch, "--model_path", model, "--task", "preference", *data, *options)
    shown = capsys.readouterr().out
    assert "judged by the value head" in shown
    scores = trained_scores(toy)
    rows = [json.loads(line) for line in output.with_suffix(".jsonl").read_text().splitlines()]
    assert [row["score"] for row in rows] == [float(chosen >= rejected) for chosen, rejected in scores]
    assert all(output.with_suffix(f".{name}.jsonl").is_file() for name in ("blank_image", "without_picture"))
    with pytest.raises(ConfigError, match="go together"):
        run(monkeypatch, "--model_path", model, "--best_of", "2", *data)
