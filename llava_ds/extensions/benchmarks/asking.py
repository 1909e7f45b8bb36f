"""Generate answers to all questions on all ranks. Answers don't depend on the rank count or on interruptions."""

from collections.abc import Callable, Container

from llava_ds.constants import DataError
from llava_ds.extensions.benchmarks.question import Question
from llava_ds.extensions.infer.generate import Answer, greedy_answers, prompt_ids
from llava_ds.extensions.infer.load import LoadedModel
from llava_ds.runtime.ranks import Ranks, gather, progress_bar

# Returns one answer per question, given the questions and their numbers.
Answering = Callable[[list[Question], list[int]], list[Answer]]


def plan_batches(loaded: LoadedModel, questions: list[Question], batch_size: int, ranks: Ranks) -> list[list[int]]:
    """Group question numbers into batches of similar length, longest first.

    Batches don't depend on the number of ranks and are never split: the other questions in a batch affect rounding,
    and so could change a word. The longest batch is first, so that out-of-memory errors come early. Raises DataError
    for a question that can't be encoded.
    """
    own = [_length(loaded, question) for question in questions[ranks.rank :: ranks.world_size]]
    shares = gather(own, ranks)
    lengths = [shares[i % ranks.world_size][i // ranks.world_size] for i in range(len(questions))]
    order = sorted(range(len(questions)), key=lambda i: (-lengths[i], i))
    return [order[first : first + batch_size] for first in range(0, len(order), batch_size)]


def _length(loaded: LoadedModel, question: Question) -> int:
    try:
        return len(prompt_ids(loaded, question.prompt))
    except DataError as error:
        raise DataError(f"question {question.id}: {error}") from error


def open_batches(batches: list[list[int]], answered: Container[int]) -> list[list[int]]:
    """Return the batches that are not fully answered."""
    return [batch for batch in batches if not all(number in answered for number in batch)]


def ask(
    loaded: LoadedModel,
    questions: list[Question],
    batches: list[list[int]],
    keep: Callable[[dict[int, Answer]], None],
    ranks: Ranks,
    *,
    max_new_tokens: int,
    progress: str,
) -> None:
    """Run every batch and pass its answers to keep().

    Ranks with a whole model each run a share. Ranks that share one model all run every batch; only rank 0 calls keep().
    """
    own = batches[ranks.rank :: ranks.world_size] if loaded.ranks is None else batches

    def greedy(batch: list[int]) -> list[Answer]:
        prompts = [questions[number].prompt for number in batch]
        return greedy_answers(loaded, prompts, batch_size=len(batch), max_new_tokens=max_new_tokens)

    ask_each(own, greedy, keep if loaded.ranks is None or ranks.is_first else lambda _: None, progress)


def ask_each(
    batches: list[list[int]],
    answers_to: Callable[[list[int]], list[Answer]],
    keep: Callable[[dict[int, Answer]], None],
    progress: str,
) -> None:
    """Answer batches of question numbers, and pass each batch's answers to keep()."""
    with progress_bar(total=sum(map(len, batches)), desc=progress, unit="question") as bar:
        for batch in batches:
            keep(dict(zip(batch, answers_to(batch), strict=True)))
            bar.update(len(batch))
