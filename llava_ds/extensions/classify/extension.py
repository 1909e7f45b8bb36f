"""The classification extension: builds the head, checks the data's labels, and replaces the objective."""

import json
from collections import Counter
from pathlib import Path

from torch import nn
from transformers import PreTrainedConfig

from llava_ds.config.arguments import ModelArguments
from llava_ds.constants import DataError
from llava_ds.data.dataset import EncodedDataset
from llava_ds.data.encoded_rows import FIELDS
from llava_ds.extensions.base import EvalMeasure, Extension
from llava_ds.extensions.classify.classify import Classification, MacroF1, ScoreHead
from llava_ds.extensions.classify.flags import Flags, is_multiple, names_of
from llava_ds.extensions.classify.label_records import CLASS
from llava_ds.files.writing import write_whole
from llava_ds.model.open.last_states import FrozenOutputLayer
from llava_ds.model.vision import TowerPlan
from llava_ds.runtime.mesh import Mesh
from llava_ds.runtime.ranks import Ranks, broadcast_from_first, print_first
from llava_ds.train.objectives.objective import Objective
from llava_ds.train.plan import Plan

LABELS_FILE = "labels.json"
SHOWN = 20  # number of labels shown in the first lines


def head(config: PreTrainedConfig, tower: TowerPlan, args: ModelArguments) -> nn.Module:
    """Build the head."""
    return ScoreHead(config.hidden_size, len(names_of(args.own["classify"])))


def check_labels(plan: Plan, ranks: Ranks) -> EvalMeasure | None:
    """Compare the labels in all data with --labels, and print how often each label occurs. Collective.

    Raises DataError for an unknown label, for a wrong number of labels, and if all training records have one label.
    """
    own = plan.args.own["classify"]
    names = ["the training data", "the held-out data"]
    lines = broadcast_from_first(
        ranks, lambda: [_counted(name, data, own) for name, data in zip(names, plan.data_sets)]
    )
    print_first(*lines)
    return None if plan.evals.eval_set is None else EvalMeasure(MacroF1(), ("f1",))


def _counted(where: str, dataset: EncodedDataset, own: Flags) -> str:
    """Return a line with the count of each label in a data set. Raises DataError like check_labels()."""
    names, several = names_of(own), is_multiple(own)
    texts, counts = dataset.table.column(FIELDS).to_pylist(), Counter()
    for row in dataset.rows.tolist():
        labels = json.loads(texts[row])["classify"][CLASS]
        if (unknown := [label for label in labels if label not in names]) or (len(labels) != 1 and not several):
            record = dataset.row(row)
            found = f"the label {unknown[0]!r}, which is not among --labels" if unknown else f"{len(labels)} labels"
            instead = "add it there" if unknown else "give --problem_type multi_label_classification"
            raise DataError(f"{record['file']}:{record['line']} in {where} has {found}: {instead}, or fix the record")
        counts.update(labels)
    if len(counts) < 2 and where == "the training data" and not several:
        raise DataError(f"all records of {where} have the label {next(iter(counts))!r}: add records with another")
    shown = ", ".join(f"{name} {number:,}" for name, number in counts.most_common(SHOWN))
    absent = len(names) - len(counts)
    return f"labels of {where}: {shown}" + (f"; {absent} of --labels have no record" if absent else "")


def objective(plan: Plan, mesh: Mesh, plain: Objective) -> Classification:
    """Return the classification objective, as a replacement for `plain`."""
    own, measure = plan.args.own["classify"], plan.own["classify"]
    return Classification(
        plain.num_sources,
        mesh.grad_ranks,
        names=tuple(names_of(own)),
        is_multiple=is_multiple(own),
        f1=None if measure is None else measure.create,
    )


def write_labels(args: ModelArguments, output_dir: Path) -> None:
    """Write the labels next to the exported head, in the form of transformers' config.json."""
    own = args.own["classify"]
    found = {"problem_type": own.problem_type, "id2label": dict(enumerate(names_of(own)))}
    write_whole(output_dir / LABELS_FILE, json.dumps(found, indent=1))


extension = Extension(
    module=head, beside=write_labels, complete=check_labels, objective=objective, part=FrozenOutputLayer
)
