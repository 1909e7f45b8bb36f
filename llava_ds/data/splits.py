"""Open the samples that a run trains on, evaluates on, and uses in extensions."""

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
) -> tuple[EncodedDataset, EncodedDataset | None, dict[str, EncodedDataset]]:
    """Return the data to train on, the data to evaluate on (None if not requested), and the data that extensions sample
    from, by extension name.

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
    own = {name: flags for name, flags in args.own.items() if flags.takes_samples}
    others = {
        name: opened(flags.data_path, None) if flags.data_path else evals or dataset for name, flags in own.items()
    }
    return dataset, evals, others
