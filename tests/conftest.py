import os
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
sys.path[:0] = [
    str(TESTS / "helpers"),
    str(TESTS.parent / "run" / "dev"),
    str(TESTS / "data"),
    *sorted(str(path) for path in (TESTS / "extensions").iterdir() if path.is_dir()),
]  # for tests in every folder
# Toys are so small that a second thread only waits; set before torch is imported, and inherited by started processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def starts_ranks(nodeid: str) -> bool:
    """Whether a test starts ranks, by its file."""
    return nodeid.startswith("tests/distributed/") or nodeid.split("::")[0].endswith("_on_ranks.py")


# What make test runs on ranks: a run that is resumed, and bad input. The other tests on ranks are make test-full's.
QUICK = ("tests/distributed/test_whole_run.py", "tests/distributed/test_bad_input.py")
SLOWER = {"long", "faults", "gpu", "cuda"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start ranks are marked full, and come first, for they take longest."""
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if starts_ranks(item.nodeid) and not item.nodeid.startswith(QUICK) and not marks & SLOWER:
            item.add_marker("full")
    items.sort(key=lambda item: starts_ranks(item.nodeid), reverse=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object):
    """In make test and test-full, tests that start ranks also share one process, so that they reuse launches.

    That is, with --dist loadfile --no-loadscope-reorder. In make test-long they are most of what there is.
    """
    from xdist.scheduler import LoadFileScheduling

    class ByFileOrRanks(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "ranks" if nodeid.startswith("tests/distributed/") else super()._split_scope(nodeid)

    in_order = config.getvalue("dist") == "loadfile" and not config.getvalue("loadscopereorder")
    return ByFileOrRanks(config, log) if in_order else None


@pytest.fixture(scope="session")
def toy_base(tmp_path_factory) -> dict[str, str]:
    """The flags that name a random language model and CLIP tower."""
    import toys

    return toys.write_base(tmp_path_factory.mktemp("toy") / "base")


@pytest.fixture(scope="session")
def tokenizer(toy_base):
    """A Llama-like tokenizer with 400 ids."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(toy_base["model_name_or_path"])


@pytest.fixture
def width_first(monkeypatch):
    """Pillow up to 12: it always resized the width first, as in LLaVA's training."""
    from PIL import Image

    resize = Image.Image.resize

    def in_two(picture, size, *args, **more):
        return resize(resize(picture, (size[0], picture.height), *args, **more), size, *args, **more)

    monkeypatch.setattr(Image.Image, "resize", in_two)


@pytest.fixture(scope="session", autouse=True)
def launches_end():
    """The launches that are kept for who comes next end well."""
    yield
    if launching := sys.modules.get("launching"):
        launching.Served.end(*launching.Served.kept)


@pytest.fixture(autouse=True)
def torchs_own_linear():
    """zero.Init leaves DeepSpeed's linear layer in torch, and it keeps other tensors: restore it for the next test."""
    functional = sys.modules.get("torch.nn.functional")
    before = functional and functional.linear
    yield
    if before is not None:
        functional.linear = before


@pytest.fixture(autouse=True)
def details_are_shown():
    """A script that ran in this process has hidden the details of a start: show them to the next test."""
    yield
    if output := sys.modules.get("llava_ds.runtime.output"):
        output.DETAILS.setLevel("NOTSET")


@pytest.fixture(scope="module")
def one_rank():
    """A process group of this process alone, through DeepSpeed: its Ranks."""
    import deepspeed

    from llava_ds.engine.process_group import init_ranks

    before = dict(os.environ)
    yield init_ranks()
    deepspeed.comm.destroy_process_group()
    # Its record of this process must not reach processes that later tests start.
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module", autouse=True)
def no_process_group_left():
    """Another module of the same worker could not begin its own."""

    def is_there() -> bool:
        distributed = sys.modules.get("torch.distributed")
        return bool(distributed and distributed.is_initialized())

    before = is_there()
    yield
    assert before or not is_there(), "destroy the process group at the end: take the fixture one_rank"
