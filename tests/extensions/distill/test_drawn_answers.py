"""Steps on sampled answers: a record's conversation up to one of its answers, and the student's own answer to it."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
import toys

from llava_ds.constants import IGNORE_INDEX
from llava_ds.data.dataset import PreflightOptions, open_encoded
from llava_ds.data.loader import windows as plain_windows
from llava_ds.data.sources import SourceOptions, open_sources
from llava_ds.data.step_plan import Packing, StepLayout
from llava_ds.engine.construct import build_model
from llava_ds.extensions.distill.extension import Distillation
from llava_ds.extensions.distill.flags import Flags
from llava_ds.model.open.model_plan import plan_model
from llava_ds.runtime.mesh import ALONE

LONGEST, SAMPLES = 5, 4


@pytest.fixture
def part(tmp_path, one_rank) -> Distillation:
    args = SimpleNamespace(model=toys.model_arguments(**toys.write_base(tmp_path / "base"), version="v1"))
    plan, images = plan_model(args.model, 512), toys.image_options()
    model = build_model(plan, args.model, {"zero_optimization": {"stage": 0}}, torch.float32, 0, one_rank)
    data = toys.write_data(tmp_path / "data", "it" * (SAMPLES // 2))
    sources = SourceOptions(image_folder=data["image_folder"], cache_dir=str(tmp_path / "cache"))
    dataset = open_encoded(
        open_sources(data["data_path"], sources), plan.tokenizer, toys.encoding_options(), images,
        PreflightOptions(cache_dir=str(tmp_path / "cache")),
    )  # fmt: skip
    layout = StepLayout([*range(SAMPLES)], [[[0, 1], [2, 3]]])
    own = Flags(lmbda=0.5, max_completion_length=LONGEST, per_device_generation_batch_size=3)
    run = SimpleNamespace(
        args=SimpleNamespace(
            own={"distill": own}, training=SimpleNamespace(seed=1), model=args.model,
            data=SimpleNamespace(model_max_length=512, dataloader_num_workers=0),
        ),
        model=plan, images=images, resolved=SimpleNamespace(autocast=lambda device: contextlib.nullcontext()),
        steps=SimpleNamespace(
            dataset=dataset, packing=Packing(1, 2, 2, None), after=lambda done: [layout] * 8,
            of_rank=lambda step, rank: layout.of_ranks[rank],
        ),
    )  # fmt: skip
    part = Distillation(run, SimpleNamespace(ranks=one_rank, mesh=ALONE))
    part.built(model)
    return part


def test_a_drawn_answer_follows_the_records_conversation(part):
    steps, device = part.plan.steps, part.ranks.device
    given = plain_windows(steps, ALONE, done=0, num_workers=0, device=device)
    dataset, windows = steps.dataset, [*part.windows(None, 0, given)]
    drawn = [window for window in windows if window.micro_batches[0].batch.extra.get("drawn")]
    assert 0 < len(drawn) < len(windows) == 8
    lengths = set()
    for window in drawn:
        assert window.counts.samples == window.num_planned == SAMPLES and not window.broken
        batches = [(micro.batch, 2 * place) for place, micro in enumerate(window.micro_batches)]
        for batch, first in batches:
            for number in range(2):
                sample, (begin, end) = dataset[first + number], batch.cu_seqlens[number : number + 2].tolist()
                is_own = batch.target_samples == number
                at = int(batch.target_positions[is_own][0]) + 1 - begin
                is_answer = sample.labels != IGNORE_INDEX
                assert is_answer[at] and not is_answer[at - 1] and end - begin - at == is_own.sum() <= LONGEST
                ids = sample.input_ids[:at].clamp(min=0)  # 0 at image positions
                assert torch.equal(batch.input_ids[0, begin : begin + at], ids)
                lengths.add((first + number, at))
        assert sum(len(batch.placing.positions) for batch, _ in batches) > 0
    assert len(lengths) > SAMPLES, "always the same answer of a record is drawn"
