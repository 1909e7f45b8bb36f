"""The axes of the mesh in flags and DeepSpeed JSON, and the model's part in them."""

from transformers import PreTrainedConfig

from llava_ds.config.arguments import Arguments
from llava_ds.config.bounds import MOST
from llava_ds.constants import ConfigError
from llava_ds.engine.ds_config.draft import AUTO, as_json
from llava_ds.model.exchange import heads_problem

KEY = "sequence_parallel_size"  # the JSON's, and the flag


def with_axes(args: Arguments, raw: dict | None) -> Arguments:
    """The flags with the JSON's sizes. Raises ConfigError where both are given and differ.

    Ranks are laid out before the JSON is resolved. DeepSpeed is not told: of sequence parallelism it would sum no
    gradients without an object of Megatron's, and with it divide them by other numbers at each stage (0.19.8).
    """
    written = (raw or {}).get(KEY)
    if written in (None, AUTO):
        return args
    if not isinstance(written, int) or isinstance(written, bool) or not 1 <= written <= MOST:
        raise ConfigError(f'{KEY} is {as_json(written)} in the DeepSpeed JSON: write a whole number above 0, or "auto"')
    if KEY in args.given and args.training.sequence_parallel_size != written:
        raise ConfigError(
            f"{KEY} is {written} in the DeepSpeed JSON but --{KEY} is {args.training.sequence_parallel_size}: make "
            'them equal, or write "auto"'
        )
    return args.replaced(sequence_parallel_size=written)


def check_axes(args: Arguments, text_config: PreTrainedConfig) -> None:
    """Raise ConfigError, with every reason, for what can't be trained on these axes."""
    training, heads = args.training, text_config.num_attention_heads
    sp = training.sequence_parallel_size
    if sp == 1:
        return
    key_heads = getattr(text_config, "num_key_value_heads", None) or heads
    problems = []
    if problem := heads_problem(heads, key_heads, sp):
        problems.append(f"the language model's {problem}")
    if training.objective not in ("sft", "dpo"):
        problems.append(
            f"--objective {training.objective} needs an answer's tokens on one rank: leave --{KEY} out, or train by "
            "sft or dpo"
        )
    if training.router_aux_loss_coef:
        problems.append("--router_aux_loss_coef balances experts over all tokens of a micro-batch: give 0")
    if problems:
        raise ConfigError("\n".join(f"--{KEY} is {sp}: {problem}" for problem in problems))


def for_engine(config: dict) -> dict:
    """A resolved JSON for DeepSpeed, without train_batch_size where it follows from the two other numbers.

    DeepSpeed checks it against all ranks, some of which may share samples.
    """
    follows = "train_micro_batch_size_per_gpu" in config
    return {key: value for key, value in config.items() if key != "train_batch_size" or not follows}
