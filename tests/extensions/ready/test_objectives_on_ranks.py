"""Objectives of ready models on real ranks: two give what one gives, and a resumed run what the whole one gave."""

import json
import shutil
from pathlib import Path

import pytest
import ready_models
import toys
from drawing_runs import LORA, RULES, TIMES, flags_of
from known_flags import known
from launching import ds_config, run_many, toy_run
from ready_models import FAMILIES
from textbook_pairs import write_pairs

from llava_ds.files.jsonl import read_metrics

STEPS, SAVED = 4, 2
WHOLE = ("smolvlm", "qwen3_vl")  # families with all runs
RATES = {"learning_rate": 1e-3, "adam_epsilon": 1e-3, "max_steps": STEPS}
PAIRS = {
    "dpo": {"objective": "dpo", "beta": 0.3},
    "reward": {"objective": "reward"},
    "packed": {**LORA, "objective": "dpo", "bits": 8},
}
COPIES = {"objective": "reward", "share_prompts": False}  # on two ranks, beside "reward"
DRAWN = {"adapters": {**LORA, "beta": 0.1}, "critic": {"objective": "ppo", "critic_learning_rate": 5e-4}}
RESUMED = "adapters"


class Runs:
    """Rows of the log of every run, by kind and number of ranks."""

    def __init__(self, family: str, folder: Path, kinds: set[str]) -> None:
        self.folder, self.family = folder, family
        (folder / "rules.py").write_text(RULES)
        model = ready_models.write_ready(folder / "base", family, **ready_models.whole_blocks(family))
        pairs = {**model, **write_pairs(folder / "pairs", 8)}
        prompts = {**model, **toys.write_data(folder / "data", "itit")}
        saves = {"save_strategy": "steps", "save_steps": SAVED}
        for ranks in (1, 2):
            todo = [
                toy_run(pairs, folder / f"{kind}-{ranks}", ds_config(2), tokens_per_micro_batch=300, **RATES, **flags)
                for kind, flags in PAIRS.items()
                if known(flags) and kind in kinds
            ]
            todo += [
                flags_of(folder, prompts, f"{kind}-{ranks}", 2, **RATES, **flags, **(saves if kind == RESUMED else {}))
                for kind, flags in DRAWN.items()
                if known(flags) and kind in kinds
            ]
            if ranks == 2 and known(COPIES):
                copies = {**RATES, **COPIES, "tokens_per_micro_batch": 300}
                todo.append(toy_run(pairs, folder / "copies-2", ds_config(2), **copies))
            run_many(ranks, folder / f"launch-{ranks}", [_of_one_rate(flags) for flags in todo], finished=False)
        if RESUMED in kinds and known(DRAWN[RESUMED]):
            for ranks in (1, 2):
                self._resume(prompts, ranks, saves)
        self.rows = {path.parents[1].name: read_metrics(path) for path in folder.glob("*/run/metrics.jsonl")}

    def _resume(self, prompts: dict[str, str], ranks: int, saves: dict[str, object]) -> None:
        """Resume from the two ranks' checkpoint."""
        whole, name = self.folder / f"{RESUMED}-2", f"resumed-{ranks}"
        (self.folder / name / "run").mkdir(parents=True)
        shutil.copytree(whole / f"checkpoint-{SAVED}", self.folder / name / f"checkpoint-{SAVED}")
        shutil.copy(whole / "run" / "metrics.jsonl", self.folder / name / "run")
        flags = flags_of(self.folder, prompts, name, 2, **RATES, **DRAWN[RESUMED], **saves)
        run_many(ranks, self.folder / f"again-{ranks}", [_of_one_rate(flags)], finished=False)


def _of_one_rate(flags: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in flags.items() if name != "mm_projector_lr"}


@pytest.fixture(scope="module", params=FAMILIES)
def runs(request, tmp_path_factory) -> Runs:
    kinds = {*PAIRS, *DRAWN} if request.param in WHOLE else {"reward", "critic"}
    return Runs(request.param, tmp_path_factory.mktemp("objectives"), kinds)


def check(runs: Runs) -> None:
    """Two ranks give one's losses and gradients: the first step's to 1e-6, later ones' to rounding."""
    kinds = {name.removesuffix("-1") for name in runs.rows if name.endswith("-1")} - {"resumed"}
    assert kinds
    for kind in kinds:
        one, two = (runs.rows[f"{kind}-{ranks}"] for ranks in (1, 2))
        assert len(one) == len(two) == STEPS
        for row, other in zip(one, two):
            close = 1e-6 if row["step"] == 1 else 2e-4
            for name in ("loss", "grad_norm"):
                assert row[name] == pytest.approx(other[name], rel=close, abs=close / 10), (kind, row["step"], name)
        assert len({row["loss"] for row in one}) > 1


def check_shared(runs: Runs, shares: bool) -> None:
    """Pairs that share their prompt give the losses and gradients of copies."""
    for row, other in zip(runs.rows["reward-2"], runs.rows["copies-2"], strict=True):
        assert (row["tokens"] < other["tokens"]) == shares
        for name in ("loss", "grad_norm"):
            close = 1e-5 if row["step"] == 1 else 2e-4
            assert row[name] == pytest.approx(other[name], rel=close, abs=close / 10), (row["step"], name)


def check_resumed(runs: Runs) -> None:
    """Bit-equal on as many ranks, equal to rounding on another number."""
    whole, again, alone = (
        [{name: value for name, value in row.items() if name not in TIMES} for row in runs.rows[name]]
        for name in (f"{RESUMED}-2", "resumed-2", "resumed-1")
    )
    assert again == whole
    for row, other in zip(whole, alone, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], abs=2e-5, rel=2e-4)
    states = [
        {
            name: sum_
            for name, sum_ in json.loads((runs.folder / run / f"checkpoint-{STEPS}/manifest.json").read_text())[
                "files"
            ].items()
            if name.endswith(".pt")
        }
        for run in (f"{RESUMED}-2", "resumed-2")
    ]
    assert states[0] and states[0] == states[1]


@pytest.mark.long
def test_objectives_on_ranks(runs):
    check(runs)
    if "copies-2" in runs.rows:
        check_shared(runs, shares=runs.family not in (*ready_models.EXPERTS, "qwen3_5"))
    if "resumed-1" in runs.rows:
        check_resumed(runs)
