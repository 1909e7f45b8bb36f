"""Asking a model all questions, on all ranks, so that neither their number nor a break changes an answer."""

from collections.abc import Callable, Container

from llava_ds.evaluation.question import Question
from llava_ds.infer.generate import Answer, greedy_answers, make_encoder, prompt_ids
from llava_ds.infer.load import LoadedModel
from llava_ds.runtime.ranks import Ranks, gather, progress_bar


def plan_batches(loaded: LoadedModel, questions: list[Question], batch_size: int, ranks: Ranks) -> list[list[int]]:
    """Which questions, by number, are asked together: neighbours in length, the longest first.

    The same on any number of ranks. A batch is always asked whole, for a text's sums are rounded otherwise beside other
    texts, and that can decide about a word. The longest come first so that too large a batch fails at once.
    """
    encoder = make_encoder(loaded)
    own = [len(prompt_ids(loaded, question.prompt, encoder)) for question in questions[ranks.rank :: ranks.world_size]]
    shares = gather(own, ranks)
    lengths = [shares[i % ranks.world_size][i // ranks.world_size] for i in range(len(questions))]
    order = sorted(range(len(questions)), key=lambda i: (-lengths[i], i))
    return [order[first : first + batch_size] for first in range(0, len(order), batch_size)]


def ask(
    loaded: LoadedModel,
    questions: list[Question],
    batches: list[list[int]],
    answered: Container[int],
    keep: Callable[[dict[int, Answer]], None],
    ranks: Ranks,
    *,
    max_new_tokens: int,
    progress: str,
) -> None:
    """Ask every batch of which not all is answered, and hand each batch's answers to keep.

    Ranks that each have all of the model take a share each; where they hold it together, all ask, and the first keeps.
    """
    own = [batch for batch in batches if not all(number in answered for number in batch)]
    if loaded.ranks is None:
        own = own[ranks.rank :: ranks.world_size]
    encoder = make_encoder(loaded)
    with progress_bar(total=sum(map(len, own)), desc=progress, unit="question") as bar:
        for batch in own:
            prompts = [questions[number].prompt for number in batch]
            answers = greedy_answers(
                loaded, prompts, batch_size=len(batch), max_new_tokens=max_new_tokens, encoder=encoder
            )
            if loaded.ranks is None or ranks.is_first:
                keep(dict(zip(batch, answers, strict=True)))
            bar.update(len(batch))
