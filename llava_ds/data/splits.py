"""The samples that a run trains on, evaluates on, and takes sample questions from."""

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
    """The data sets to train on, to evaluate on, and to take questions from; None where no flag asks for one.

    All ranks call it together.
    """
    data, training = args.data, args.training

    def opened(path: str, split: str | None) -> EncodedDataset:
        return open_together(args.replaced(data_path=path, data_split=split), tokenizer, image_options, ranks)

    evals = None
    if data.eval_fraction:
        seed = training.seed if training.data_seed is None else training.data_seed
        dataset, evals = dataset.without_part(data.eval_fraction, seed)
    elif data.eval_data_path is not None:
        evals = opened(data.eval_data_path, data.eval_data_split)
    if not training.sample_steps:
        return dataset, evals, None
    return dataset, evals, opened(data.sample_data_path, None) if data.sample_data_path else evals or dataset
