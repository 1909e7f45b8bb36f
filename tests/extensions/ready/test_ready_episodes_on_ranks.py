"""Ready models answer in several turns: later images are drawn and trained alike."""

import pytest
import ready_models
import toys
from drawing_runs import RULES, flags_of, read_rollouts
from episodes_toy import GAME
from extension_there import needs_extension
from launching import run_many
from ready_models import FAMILIES

from llava_ds.files.jsonl import read_metrics

pytestmark = needs_extension("environment")
QUICK = "qwen3_vl"  # three axes of positions, and features for later layers
LONG = {"max_completion_length": 200, "max_turn_length": 60, "max_turns": 3, "max_steps": 1, "num_generations": 16}


@pytest.mark.parametrize("family", [QUICK, *(pytest.param(one, marks=pytest.mark.long) for one in FAMILIES)])
def test_the_drawing_has_the_log_probabilities_of_training(family, tmp_path):
    """A random model hardly ends a turn, so turns are long and many; prompts are shared or not."""
    (tmp_path / "rules.py").write_text(RULES)
    (tmp_path / "game.py").write_text(GAME)
    model = ready_models.write_ready(tmp_path / "base", family, **ready_models.whole_blocks(family))
    given = {**model, **toys.write_data(tmp_path / "data", "itii")}
    more = {"environment": f"{tmp_path}/game.py:Crops", **LONG, "learning_rate": 1e-3, "tokens_per_micro_batch": 3000}
    todo = [flags_of(tmp_path, given, f"{shares}", 2, share_prompts=shares, **more) for shares in (True, False)]
    todo = [{name: value for name, value in flags.items() if name != "mm_projector_lr"} for flags in todo]
    run_many(1, tmp_path / "launch", todo, finished=False)
    [row], [other] = (read_metrics(tmp_path / name / "run" / "metrics.jsonl") for name in ("True", "False"))
    assert row["episodes/turns"] > 1 and 0 < row["sampling_gap"] < 1e-5
    assert read_rollouts(tmp_path / "True") == read_rollouts(tmp_path / "False")
    for name in ("loss", "grad_norm", "reward"):
        assert row[name] == pytest.approx(other[name], rel=1e-5, abs=1e-6), name
