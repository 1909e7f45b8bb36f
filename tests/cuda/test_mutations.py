"""Mistakes put into forward, backward and the loop: each is found."""

import pytest
import torch
import toys
from fake_gpu import CUDA, HostWait, UnlikeDtypes, gpu
from fake_models import Engine, arguments, built, on_gpu, sample, tower_plan
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from llava_ds.data.loader import Window
from llava_ds.engine.runner import Direct
from llava_ds.runtime.mesh import Mesh
from llava_ds.train.loop import run_steps
from llava_ds.train.objectives.objective import SFT
from llava_ds.train.state import TrainState

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("one_rank")]


def with_gradient_hook(hidden: torch.Tensor) -> torch.Tensor:
    hidden.register_hook(lambda gradient: gradient / gradient.norm().item())
    return hidden


MISTAKES = {
    "reads a value": lambda hidden: hidden * hidden.amax().item(),
    "asks a question": lambda hidden: hidden if hidden.isfinite().all() else hidden * 0,
    "makes a list": lambda hidden: hidden * len(hidden.flatten()[:3].tolist()),
    "picks by a mask": lambda hidden: hidden + hidden[hidden > 0].sum(),
    "looks for places": lambda hidden: hidden + (hidden > 0).nonzero().sum(),
    "adds a host's tensor": lambda hidden: hidden + torch.ones(hidden.shape[-1]),
    "indexes from the host": lambda hidden: hidden[torch.arange(len(hidden))],
    "brings a constant over": lambda hidden: hidden * torch.tensor([2.0]).to(CUDA),
    "takes it to the host": lambda hidden: hidden + hidden.cpu().to(CUDA, non_blocking=True),
    "changes the dtype": lambda hidden: hidden.float(),
    "waits for the device": lambda hidden: torch.cuda.synchronize() or hidden,
    "reads a gradient": with_gradient_hook,
}
ERRORS = (HostWait, UnlikeDtypes, DynamicOutputShapeException, RuntimeError)


def run(mistake, place: str) -> None:
    options, args = toys.image_options(), arguments()
    samples = [sample(options, 9, [("image", ((40, 30),))]), sample(options, 30)]
    with gpu() as rules:
        with rules.building():
            model = built(toys.language_model_config(), tower_plan("clip", args), args, short=True)
        engine = Engine(model)
        if place == "a layer":
            norm = model.language_model.model.layers[0].post_attention_layernorm
            norm.register_forward_hook(lambda module, inputs, result: mistake(result))
        elif place == "the projector":
            model.projector.register_forward_hook(lambda module, inputs, result: mistake(result))
        window = Window(on_gpu(samples, options), 2, 0.0)

        def after_step(result) -> float:
            if place == "the loop":
                mistake(result.by_source)
            return 0.0

        run_steps(
            Direct(engine), iter([window]), TrainState(), 1, SFT(num_sources=2, grad_ranks=1), Mesh(1, 0), after_step
        )
        assert not rules.waits


@pytest.mark.parametrize("place", ["a layer", "the projector", "the loop"])
def test_without_a_mistake_there_is_nothing_to_find(place):
    run(lambda result: result, place)


# Features of another dtype are no mistake: they are placed in the language model's.
PLACES = [(name, place) for name in MISTAKES for place in ("a layer", "the projector")]
PLACES.remove(("changes the dtype", "the projector"))


@pytest.mark.parametrize(("mistake", "place"), PLACES)
def test_a_mistake_in_the_model_is_found(mistake, place):
    with pytest.raises(ERRORS):
        run(MISTAKES[mistake], place)


@pytest.mark.parametrize("mistake", ["reads a value", "asks a question", "makes a list", "takes it to the host"])
def test_a_mistake_in_the_loop_is_found(mistake):
    with pytest.raises(HostWait):
        run(MISTAKES[mistake], "the loop")
