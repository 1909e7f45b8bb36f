"""Meanings of the columns of a table of scores: the conditions under which questions were asked again."""

from llava_ds.tracking.markup import sentence

# By the columns' names in evaluation.json.
CONDITIONS = {
    "blank image": "an image of one colour in the place of each: prompts as in training, nothing to see in them",
    "without picture": "neither image nor mark: what the language model answers to the bare question, which the "
    "training may never have shown it",
}


def conditions_note(scores: object) -> str:
    """A sentence, as HTML, for each condition that a table of scores has; "" where it has none."""
    return "".join(
        sentence(f"{name}: {meaning}.", "note")
        for name, meaning in CONDITIONS.items()
        if isinstance(scores, dict) and name in scores
    )
