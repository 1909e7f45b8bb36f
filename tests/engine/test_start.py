"""Muon's groups, and the check that an engine's groups are those that were meant."""

from types import SimpleNamespace

import pytest
import torch
from ds_json import arguments
from torch import nn
from transformers import PreTrainedConfig

from llava_ds.constants import ConfigError
from llava_ds.engine.param_groups import describe_parts, parameter_groups
from llava_ds.engine.start import check_groups


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = PreTrainedConfig()
        self.embeddings, self.output = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.hidden, self.norm = nn.Linear(4, 4, bias=False), nn.LayerNorm(4)

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings

    def get_output_embeddings(self) -> nn.Module:
        return self.output


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projector, self.language_model = nn.Linear(4, 4), LanguageModel()


MUON = {"type": "muon", "params": {"lr": 1e-3, "muon_lr": 2e-2, "adam_lr": 3e-4}}


def rates_and_sizes(groups: list[dict]) -> list[tuple[float, int]]:
    return [(group["lr"], sum(p.numel() for p in group["params"])) for group in groups]


def test_muon_gets_hidden_matrices_and_adam_the_rest_each_at_its_rate():
    whole = Whole()
    groups = parameter_groups(whole, arguments(learning_rate=1e-3), MUON)
    # Hidden matrix; embeddings and output layer; norm; projector's matrix; its bias.
    assert rates_and_sizes(groups) == [(2e-2, 16), (3e-4, 40), (3e-4, 8), (2e-2, 16), (3e-4, 4)]
    assert describe_parts(whole, groups)[2].endswith("0.0003 and 0.02")


def test_the_projectors_own_rate_wins_over_muons():
    groups = parameter_groups(Whole(), arguments(learning_rate=1e-3, mm_projector_lr=5e-3), MUON)
    assert [lr for lr, _ in rates_and_sizes(groups)] == [2e-2, 3e-4, 3e-4, 5e-3, 5e-3]
    plain = {"type": "Muon", "params": {}}
    assert {lr for lr, _ in rates_and_sizes(parameter_groups(Whole(), arguments(learning_rate=1e-3), plain))} == {1e-3}


def test_an_engine_with_other_groups_is_refused():
    weights = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]
    optimizer = torch.optim.SGD([{"params": [p], "lr": rate} for p, rate in zip(weights, (0.1, 0.2))])
    engine = SimpleNamespace(optimizer=optimizer, basic_optimizer=optimizer)
    check_groups(engine, optimizer.param_groups, [(0.1, 0, 2), (0.2, 0, 3)])
    with pytest.raises(ConfigError, match=r"SGD has unexpected parameter groups .*\(0\.2, 0, 3\)\] instead of"):
        check_groups(engine, optimizer.param_groups, [(0.1, 0, 2), (0.3, 0, 3)])
    engine.basic_optimizer = torch.optim.SGD([{"params": [p]} for p in weights])
    with pytest.raises(ConfigError, match="unexpected parameter groups"):
        check_groups(engine, optimizer.param_groups, [(0.1, 0, 2), (0.2, 0, 3)])
