"""A run goes on on another mesh than it was saved on, and bit for bit on the same."""

import itertools
from pathlib import Path

import pytest
import toys
from checkpoints import break_off, differences
from known_flags import known_cases
from launching import ds_config, losses, run_many, toy_run
from safetensors.torch import load_file

pytestmark = pytest.mark.long

STEPS, SAVED, TOLERANCE = 40, 20, 1e-6
# Name: ranks, and the flags of the mesh.
MESHES = {
    "dp2": (2, {}),
    "sp2": (2, {"sequence_parallel_size": 2}),
    "dp4": (4, {}),
    "dp2xsp2": (4, {"sequence_parallel_size": 2}),
    "tp2": (2, {"tensor_parallel_size": 2}),
    "dp2xtp2": (4, {"tensor_parallel_size": 2}),
    "sp2xtp2": (4, {"sequence_parallel_size": 2, "tensor_parallel_size": 2}),
    "pp2": (2, {"pipeline_parallel_size": 2}),
    "pp2xdp2": (4, {"pipeline_parallel_size": 2}),
    "pp2xsp2": (4, {"pipeline_parallel_size": 2, "sequence_parallel_size": 2}),
}
MESHES = known_cases(MESHES)
# Another one here and there.
STAGE = {"dp2": 2, "sp2": 3, "dp4": 3, "dp2xsp2": 1, "tp2": 0, "dp2xtp2": 3, "sp2xtp2": 1}
STAGE |= {"pp2": 1, "pp2xdp2": 0, "pp2xsp2": 1}
EVERY_PAIR = ("dp2", "sp2", "tp2", "pp2", "dp4", "sp2xtp2")  # the others from the first of these and back
PAIRS = [
    (before, after)
    for before, after in itertools.product(MESHES, MESHES)
    if {before, after} <= {*EVERY_PAIR} or before == after or "dp2" in (before, after)
]


def launched(mesh: str) -> tuple[int, str]:
    """The launch that runs on a mesh: its ranks, and "tp", "pp" or neither, as a process has DeepSpeed's groups of
    one mesh."""
    ranks, flags = MESHES[mesh]
    return ranks, next((flag[0] + "p" for flag in flags if not flag.startswith("seq")), "")


LAUNCHES = sorted(set(map(launched, MESHES)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Output folders: of whole runs by mesh, and of those that went on by "FROM to TO"."""
    folder = tmp_path_factory.mktemp("meshes")
    given = toys.write_base(folder / "base") | toys.write_data(folder / "data", "iitiitittiititit")

    def run(name: str, mesh: str) -> dict[str, object]:
        more = {"train_batch_size": 8, "tokens_per_micro_batch": 300, "max_steps": STEPS, "save_steps": SAVED}
        rates = {"learning_rate": 5e-4, "mm_projector_lr": 5e-4, "max_grad_norm": 1.0, "warmup_ratio": 0.1}
        flags = {**more, **rates, **MESHES[mesh][1], "save_strategy": "steps"}
        return toy_run(given, folder / name, ds_config(STAGE[mesh]), **flags)

    for ranks, axis in LAUNCHES:
        whole = [run(mesh, mesh) for mesh in MESHES if launched(mesh) == (ranks, axis)]
        run_many(ranks, folder / f"whole-{ranks}-{axis}", whole)
    for ranks, axis in LAUNCHES:
        moved = []
        for before, after in PAIRS:
            if launched(after) == (ranks, axis):
                break_off(folder / before, folder / f"{before} to {after}", SAVED)
                moved.append(run(f"{before} to {after}", after))
        said = run_many(ranks, folder / f"moved-{ranks}-{axis}", moved, timeout_s=1800)
        assert said.count(f"resumed at step {SAVED}") == len(moved)
    return folder


@pytest.mark.parametrize("mesh", MESHES)
def test_on_the_same_mesh_it_is_bit_equal(folder, mesh):
    whole, resumed = folder / mesh, folder / f"{mesh} to {mesh}"
    assert losses(whole) == losses(resumed) and len(losses(whole)) == STEPS
    assert differences(whole / f"checkpoint-{STEPS}", resumed / f"checkpoint-{STEPS}") == []


@pytest.mark.parametrize("mesh", list(MESHES)[1:])
def test_every_mesh_trains_the_same_model(folder, mesh):
    check_same(folder / "dp2", folder / mesh)


@pytest.mark.parametrize(("before", "after"), [pair for pair in PAIRS if pair[0] != pair[1]])
def test_on_another_mesh_it_goes_on_as_before(folder, before, after):
    check_same(folder / before, folder / f"{before} to {after}")


def check_same(one: Path, other: Path) -> None:
    assert len(losses(one)) == STEPS
    assert max(abs(a - b) for a, b in zip(losses(one), losses(other), strict=True)) <= TOLERANCE
    expected, found = (load_file(path / "model.safetensors") for path in (one, other))
    assert expected.keys() == found.keys()
    for key, weight in expected.items():
        assert (weight - found[key]).abs().max() <= 1e-5, key
