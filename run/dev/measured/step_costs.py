"""Costs of what a step, a save or an answer does beside computing, and of computing in other ways."""

import random
import re
import statistics
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from benchmark.decoding_speed import PHOTO_SIZES, measure_decoding
from measured.timing import in_turns, show_beside

WAITED = re.compile(r"is saved: training waited ([\d.]+) s(?:, written in ([\d.]+) s)?")


def decoding(num_images: int = 6, seconds: float = 30.0) -> None:
    """Error and speed of --fast_image_decoding against the exact path and LLaVA's; --seconds for every size."""
    print("size            ratio    mean  max (of 255)   LLaVA    ours    fast /s   over LLaVA   over ours")
    for name, sizes in (("as COCO's", PHOTO_SIZES), ("1920 x 1080", ((1920, 1080),)), ("4000 x 3000", ((4000, 3000),))):
        for ratio, found in measure_decoding(num_images, seconds, 0, sizes).items():
            llava, over = found.get("llava_per_s", float("nan")), found.get("fast_over_llava", float("nan"))
            print(f"{name:15} {ratio:7} {found['mean_error']:6.3f} {found['max_error']:4} {llava:16.1f} ", end="")
            print(f"{found['ours_per_s']:7.1f} {found['fast_per_s']:7.1f} {over:12.2f} {found['fast_over_ours']:11.2f}")


def experts(
    hidden: int = 512, width: int = 704, layers: int = 2, number: int = 8, chosen: int = 2, rounds: int = 5
) -> None:
    """Forward and backward of 1,024 tokens with experts, beside a dense model of the same active FLOPs, on the CPU.

    Mixtral by two ways of computing experts (batched_mm copies a token's matrices: gigabytes), and DeepSpeed's layer.
    The dense model has an MLP as wide as the experts of a token together.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from llava_ds.config.arguments import ModelArguments
    from llava_ds.model import attention
    from llava_ds.model.mixture import choose_experts
    from llava_ds.model.upcycling import add_experts, upcycled_config

    torch.set_num_threads(1)
    torch.manual_seed(0)
    attended = attention.register()

    def config_of(family: str, width: int, **more: int):
        sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 8}
        return AutoConfig.for_model(family, vocab_size=1000, intermediate_size=width, **sizes, **more)

    def built(config) -> torch.nn.Module:
        return AutoModelForCausalLM.from_config(config, attn_implementation=attended).train()

    models = {"dense": built(config_of("llama", chosen * width))}
    for way in ("grouped_mm", "eager"):
        models[way] = built(config_of("mixtral", width, num_local_experts=number, num_experts_per_tok=chosen))
        choose_experts(models[way], way, torch.device("cpu"), compiled=False)
    args = ModelArguments(moe_enable=True, moe_mode="dense", num_experts=number, top_k_experts=chosen)
    config = upcycled_config(config_of("llama", width), args)
    models["upcycled"] = built(config)
    add_experts(models["upcycled"].train(), config, args)

    def step(model: torch.nn.Module) -> None:
        """One pack of four samples."""
        bounds = torch.arange(0, 1025, 256, dtype=torch.int32)
        given = {"input_ids": torch.randint(0, 1000, (1, 1024)), "position_ids": torch.arange(256).repeat(4)[None]}
        found = model.base_model(**given, cu_seqlens=bounds, max_seqlen=256, use_cache=False)
        found.last_hidden_state.square().mean().backward()
        model.zero_grad(set_to_none=True)

    show_beside(in_turns({name: partial(step, model) for name, model in models.items()}, rounds))


def logprobs(
    model_path: str = "output/tiny-finetune",
    cache_dir: str = "~/.cache/llava_ds",
    questions: int = 192,
    rounds: int = 7,
) -> None:
    """Asking eval questions with and without recording the probabilities of the answers."""
    from transformers import LogitsProcessor

    from llava_ds.evaluation.benchmark_files import Given
    from llava_ds.evaluation.tasks import read_questions
    from llava_ds.infer import generate
    from llava_ds.infer.load import load_model
    from llava_ds.tiny.default import heldout_data

    class Nothing(LogitsProcessor):
        """In the place of what records."""

        def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
            return scores

        def totals(self, new: torch.Tensor, stops: list[int]) -> list[tuple[float, int]]:
            return [(0.0, 0)] * len(new)

    loaded = load_model(model_path)
    data_path, folder = heldout_data(cache_dir)
    prompts = [each.prompt for each in read_questions("llava", Given(data_path, image_folder=folder), questions)]

    def ask(recorder: type) -> None:
        with mock.patch.object(generate, "_GreedyLogprobs", recorder):
            generate.greedy_answers(loaded, prompts, batch_size=48)

    kinds = {"without": Nothing, "with": generate._GreedyLogprobs}
    show_beside(in_turns({name: partial(ask, kind) for name, kind in kinds.items()}, rounds))


def saving(rounds: int = 2, steps: int = 24, save_steps: int = 8) -> None:
    """The time that training waits for a save, at once and in the background.

    Two CPU ranks, ZeRO-2, a toy with 12 million weights that train; the runs alternate.
    """
    import toys
    from launching import ds_config, run_many, toy_run

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shape = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4}
        given = toys.write_base(folder / "base", **shape) | toys.write_data(folder / "data", "ittiitti")
        options = {"save_strategy": "steps", "max_steps": steps, "save_steps": save_steps}
        found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for number in range(rounds):
            for background in found:
                output_dir = folder / f"{number}-{background}"
                flags = toy_run(given, output_dir, ds_config(2), **options, async_save=background)
                said = run_many(2, folder / f"launch-{number}-{background}", [flags], timeout_s=600)
                # The last save of a run is waited for in both cases.
                found[background] += [(float(a), float(b or 0)) for a, b in WAITED.findall(said)][:-1]
        size = sum(path.stat().st_size for path in (output_dir / f"checkpoint-{steps}").rglob("*") if path.is_file())
    print(f"{size / 1e6:.0f} MB a checkpoint")
    for background, times in found.items():
        waited, written = (statistics.median(column) for column in zip(*times))
        behind = f", written in {written:.3f} s" if background else ""
        print(f"--async_save {background}: training waits {waited:.3f} s{behind} (median of {len(times)})")


def logging(rounds: int = 9, steps: int = 100, rows: int = 100_000) -> None:
    """Logging a step: metrics.jsonl, metrics.csv, TensorBoard, loss.png, the bar, the watch for bad steps; all threads.

    Rounds of --steps that are logged alternate with rounds that are not; and the sizes of the files after --rows.
    """
    from llava_ds.tracking import progress

    progress.sum_over = lambda group, values: values  # there is one rank
    drawn = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        log, count = Log(Path(name), num_steps=10**9), [0]

        def run(logged: bool) -> None:
            for _ in range(steps):
                count[0] += 1
                result = result_of(count[0], drawn)
                if logged:
                    log.after_step(result)

        seconds = in_turns({"computed": partial(run, False), "logged": partial(run, True)}, rounds)
        log.close()
    each = sorted(1e3 * (both - alone) / steps for alone, both in zip(*seconds.values()))
    print(
        f"CPU per step: {statistics.median(each):.2f} ms (median of {rounds} rounds, {each[0]:.2f} to {each[-1]:.2f})"
    )
    with tempfile.TemporaryDirectory() as name:
        log = Log(Path(name), rows)
        for step in range(1, rows + 1):
            log.after_step(result_of(step, drawn))
        log.close()
        files = [*Path(name).glob("metrics.*"), *Path(name).glob("tensorboard/*")]
        print(f"{rows:,} rows:", ", ".join(f"{file.name} {file.stat().st_size / 1e6:.1f} MB" for file in files))


class Log:
    """The log and the watches, as the hooks of a run drive them."""

    def __init__(self, folder: Path, num_steps: int) -> None:
        from llava_ds.data.sample_order import SampleOrder
        from llava_ds.data.step_plan import Packing, StepPlan
        from llava_ds.model.flops import ModelFlops
        from llava_ds.runtime.mesh import Mesh
        from llava_ds.runtime.ranks import Ranks
        from llava_ds.tracking.progress import Progress, RunFacts
        from llava_ds.tracking.trackers import TensorBoard, Trackers
        from llava_ds.train.skipped_samples import SkippedSamples
        from llava_ds.train.skipped_steps import SkippedSteps

        dataset = SimpleNamespace(sources=["data"])  # looked at only where something went wrong
        plan = StepPlan(dataset, SampleOrder(665_000, 128, seed=0), Packing(1, 128, 1, None), num_steps)
        flops = ModelFlops(per_token=1.4e10, per_pair=1e3, per_tile=3.6e11, per_target=1e8)
        alone = Ranks(0, 0, 1, torch.device("cpu"))
        facts = RunFacts("a run", folder, 1, 0, flops, 8e15, lambda counts: counts.targets)
        trackers = Trackers({"tensorboard": TensorBoard(None, folder, 0)}, min(num_steps, 5_000))
        self.progress = Progress(facts, plan, trackers, alone, Mesh.of(alone))
        self.watches = (
            SkippedSamples(folder / "skipped.jsonl", [], 1, 0, alone),
            SkippedSteps(folder, plan, 3, (0, 0), alone),
        )

    def after_step(self, result) -> None:
        read, _ = self.progress.after_step(result)
        for watch in self.watches:
            watch.add(read)

    def close(self) -> None:
        self.progress.bar.close()
        self.progress.trackers.close()


def result_of(step: int, drawn: random.Random):
    """Numbers with as many digits as real ones have, of four parameter groups."""
    from llava_ds.train.state import StepResult

    rate, vary = 2e-5 * drawn.random(), drawn.random()
    counts = torch.tensor([128, 108_416 + int(9_000 * vary), 17_000 + int(2_000 * vary), 16, 5e7, 300])
    return StepResult(
        step=step,
        loss=torch.tensor(0.7 + vary / 10),
        by_source=torch.ones(2, 1),
        counts=counts.double(),
        grad_norm=1 + vary,
        skipped_steps=0,
        lr=[rate, rate, rate / 7, rate / 7],
        num_planned=128,
        broken=[],
        data_wait_s=vary / 100,
        step_time_s=3.2 + vary / 10,
    )
