"""Which samples a run trains on, which it measures its loss on, and which it takes questions from."""

from transformers import PreTrainedTokenizerBase

from llava_ds.config.arguments import Arguments
from llava_ds.data.dataset import EncodedDataset, open_together
from llava_ds.geometry import ImageOptions
from llava_ds.runtime.ranks import Ranks


def split_datasets(
    args: Arguments,
    dataset: EncodedDataset,
    tokenizer: PreTrainedTokenizerBase,
    image_options: ImageOptions,
    ranks: Ranks,
) -> tuple[EncodedDataset, EncodedDataset | None, EncodedDataset | None]:
    """What is trained on of a data set, what is held out, and what questions come from; None of what no flag asks for.

    All ranks call it together.
    """
    data, training = args.data, args.training

    def opened(path: str) -> EncodedDataset:
        return open_together(args.replaced(data_path=path), tokenizer, image_options, ranks)

    held_out = None
    if data.eval_fraction:
        seed = training.seed if training.data_seed is None else training.data_seed
        dataset, held_out = dataset.without_part(data.eval_fraction, seed)
    elif data.eval_data_path is not None:
        held_out = opened(data.eval_data_path)
    if not training.sample_steps:
        return dataset, held_out, None
    return dataset, held_out, opened(data.sample_data_path) if data.sample_data_path else held_out or dataset
