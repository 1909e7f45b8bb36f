"""Every family of language models through the real launcher: partitioned and whole, trained, exported and reloaded."""

from pathlib import Path

import pytest
import toys
from known_flags import known_cases
from launching import ds_config, losses, run_many, toy_run

STEPS = 3
HOWS = {
    "partitioned": (3, {}),
    "recomputed": (3, {"gradient_checkpointing": True}),
    "compiled": (3, {"torch_compile": True, "torch_compile_backend": "eager"}),
    "compiled_and_recomputed": (
        3,
        {"torch_compile": True, "torch_compile_backend": "eager", "gradient_checkpointing": True},
    ),
}
HOWS = known_cases(HOWS)
# One that is unlike Llama in much; all others, and all ways, are left to make test-long.
DAILY = [("gemma2", "recomputed")]
FULL = [(family, how) for family in toys.FAMILIES for how in HOWS if (family, how) not in DAILY]


def trained(folder: Path, cases: list[tuple[str, str]]) -> dict[tuple[str, str], Path]:
    """Output folders by family and how it was trained; every run ends with a look at what transformers reloads."""
    data = toys.write_data(folder / "data", "itii")
    outputs, runs = {}, []
    for family in dict(cases):
        base = toys.write_base(folder / "base", family=family)
        ways = {"whole": (0, {})} | {how: HOWS[how] for name, how in cases if name == family}
        for how, (stage, more) in ways.items():
            out = outputs[family, how] = folder / f"{family}-{how}"
            runs.append(toy_run(base | data, out, ds_config(stage), max_steps=STEPS, **more))
    output = run_many(2, folder / "launch", runs, timeout_s=900)
    assert output.count("reloaded with transformers") == len(runs)
    return outputs


@pytest.fixture(scope="session")
def daily(tmp_path_factory) -> dict[tuple[str, str], Path]:
    return trained(tmp_path_factory.mktemp("daily"), DAILY)


@pytest.fixture(scope="session")
def full(tmp_path_factory) -> dict[tuple[str, str], Path]:
    return trained(tmp_path_factory.mktemp("full"), FULL)


def largest_difference(one: Path, other: Path) -> float:
    curves = losses(one), losses(other)
    assert len(curves[0]) == len(curves[1]) == STEPS and curves[0][0] - curves[0][-1] > 1e-2
    return max(abs(a - b) for a, b in zip(*curves))


@pytest.mark.long
@pytest.mark.parametrize(("family", "how"), DAILY)
def test_partitioned_and_recomputed_it_learns_the_same(daily, family, how):
    assert largest_difference(daily[family, "whole"], daily[family, how]) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize(("family", "how"), FULL)
def test_so_does_every_family_in_every_way(full, family, how):
    assert largest_difference(full[family, "whole"], full[family, how]) < 1e-5
