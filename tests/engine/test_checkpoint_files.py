"""DeepSpeed's files are read for what they hold, and nothing in them is run."""

from pathlib import Path

import pytest
import torch

from llava_ds.constants import DataError
from llava_ds.engine.checkpoint_files import model_states, optimizer_states, read_states


class Trap:
    def __reduce__(self):
        return (Path.touch, (Path("sprung"),))


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_with_code_in_it_is_refused_and_nothing_runs(tmp_path, monkeypatch, zipped):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    torch.save(
        {"optimizer_state_dict": {"w": torch.ones(2), "more": Trap()}}, file, _use_new_zipfile_serialization=zipped
    )
    for read in (lambda: read_states(file), lambda: optimizer_states(tmp_path, 1)):
        with pytest.raises(DataError, match=r"is refused: beside tensors it holds|can't be read"):
            read()
    assert not Path("sprung").exists()
    torch.save({"optimizer_state_dict": {"w": torch.ones(2)}}, file, _use_new_zipfile_serialization=zipped)
    assert optimizer_states(tmp_path, 1)["w"].tolist() == [1, 1]


def test_missing_files_are_named(tmp_path):
    with pytest.raises(DataError, match=r"holds neither mp_rank_00_model_states\.pt nor zero_pp_rank_0_"):
        model_states(tmp_path)
    with pytest.raises(DataError, match=r"holds 0 files named \*zero_pp_rank_3_mp_rank_00_optim_states\.pt, not 1"):
        optimizer_states(tmp_path, 3)
