"""What a report says of samples that are not trained on: which they are, and how many broke."""

import toys

from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments
from llava_ds.data.splits import split_datasets
from llava_ds.files.jsonl import read_metrics
from llava_ds.runtime.ranks import Ranks
from llava_ds.tracking.eval_log import EvalLoss, Evals
from llava_ds.tracking.run_record import eval_summary
from llava_ds.tracking.trackers import Trackers

ALONE = Ranks(0, 0, 1, None)


def test_the_record_says_how_many_samples_are_held_out_and_from_where(tmp_path, tokenizer):
    data = toys.write_data(tmp_path / "data", "ittiitti")
    dataset = toys.encoded(**data, tokenizer=tokenizer, cache_dir=tmp_path / "cache")
    args = Arguments(ModelArguments(), DataArguments(eval_fraction=0.25), TrainingArguments(seed=7), frozenset())
    rest, held_out, _ = split_datasets(args, dataset, tokenizer, dataset.image_options, ALONE)
    said = "\n".join(eval_summary(args, held_out))
    assert "2 samples of the accepted records" in said and "--eval_fraction 0.25, drawn by seed 7" in said
    assert "8 records: 8 accepted, 0 rejected; 2 of the accepted are eval samples" in rest.summary()
    assert not any("held out" in line for line in dataset.summary())
    other = Arguments(ModelArguments(), DataArguments(eval_data_path="o.json"), TrainingArguments(), frozenset())
    said = eval_summary(other, dataset)
    assert said[0] == "8 samples of --eval_data_path o.json" and "8 records: 8 accepted, 0 rejected" in said
    assert eval_summary(other, None) == []


def test_held_out_samples_that_broke_are_counted(tmp_path, capsys):
    evals = Evals(tmp_path, 0, ALONE, Trackers({}, 5))
    evals.add(2, EvalLoss(1.5, 100, 8, {}, {}), {}, broken=0, seconds=(0.1, 0.0))
    evals.add(4, EvalLoss(1.25, 90, 7, {}, {}), {}, broken=1, seconds=(0.1, 0.0))
    assert [(row["samples"], row["broken_samples"]) for row in read_metrics(tmp_path / "evals.jsonl")] == [
        (8, 0), (7, 1),
    ]  # fmt: skip
    first, second = capsys.readouterr().out.splitlines()
    assert "broke" not in first and "on 7 eval samples (1 left out as broken) is 1.2500" in second
