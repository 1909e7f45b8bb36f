"""Every family of language models through the real launcher: partitioned and whole, trained, exported and reloaded."""

from pathlib import Path

import pytest
import toys
from launching import ds_config, losses, run_many, toy_run

STEPS = 3
HOWS = {
    "zero0": (0, {}),
    "zero3": (3, {}),
    "zero3_recomputed": (3, {"gradient_checkpointing": True}),
    "zero3_compiled": (3, {"torch_compile": True, "torch_compile_backend": "eager"}),
}


def trained(folder: Path, families: list[str]) -> dict[tuple[str, str], Path]:
    """Output folders by family and how it was trained; every run ends with a look at what transformers reloads."""
    data = toys.write_data(folder / "data", "itii")
    outputs, runs = {}, []
    for family in families:
        base = toys.write_base(folder / "base", family=family)
        for how, (stage, more) in HOWS.items():
            out = outputs[family, how] = folder / f"{family}-{how}"
            runs.append(toy_run(base | data, out, ds_config(stage), max_steps=STEPS, **more))
    output = run_many(2, folder / "launch", runs, timeout_s=600)
    assert output.count("reloaded with transformers") == len(runs)
    return outputs


@pytest.fixture(scope="session")
def two(tmp_path_factory) -> dict[tuple[str, str], Path]:
    return trained(tmp_path_factory.mktemp("two"), ["gemma2", "opt"])


@pytest.fixture(scope="session")
def others(tmp_path_factory) -> dict[tuple[str, str], Path]:
    return trained(tmp_path_factory.mktemp("others"), [name for name in toys.FAMILIES if name not in ("gemma2", "opt")])


def largest_difference(one: Path, other: Path) -> float:
    curves = losses(one), losses(other)
    assert len(curves[0]) == len(curves[1]) == STEPS and curves[0][0] - curves[0][-1] > 1e-2
    return max(abs(a - b) for a, b in zip(*curves))


@pytest.mark.parametrize("how", [how for how in HOWS if how != "zero0"])
@pytest.mark.parametrize("family", ["gemma2", "opt"])
def test_partitioned_recomputed_and_compiled_it_learns_the_same(two, family, how):
    assert largest_difference(two[family, "zero0"], two[family, how]) < 1e-5


@pytest.mark.full
@pytest.mark.parametrize("how", [how for how in HOWS if how != "zero0"])
@pytest.mark.parametrize("family", [name for name in toys.FAMILIES if name not in ("gemma2", "opt")])
def test_so_do_the_other_families(others, family, how):
    assert largest_difference(others[family, "zero0"], others[family, how]) < 1e-5
