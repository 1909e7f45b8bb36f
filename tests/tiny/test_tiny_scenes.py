"""Scenes: the same seed gives the same picture; what the words say is what the pixels show."""

import numpy as np
import pytest

from llava_ds.tiny.questions import KINDS, Balance, all_questions, conversation
from llava_ds.tiny.scenes import COLOURS, PLACES, Scene, Thing, draw_scene, is_heldout, sample_scene


def test_same_seed_same_pixels():
    pictures = [[draw_scene(sample_scene(rng)) for _ in range(20)] for rng in map(np.random.default_rng, (5, 5, 6))]
    assert [p.tobytes() for p in pictures[0]] == [p.tobytes() for p in pictures[1]]
    assert [p.tobytes() for p in pictures[0]] != [p.tobytes() for p in pictures[2]]


def test_things_show_their_colour_at_their_place_and_stay_in_their_cell():
    rng = np.random.default_rng(1)
    for _ in range(100):
        scene = sample_scene(rng)
        assert len({t.place for t in scene.things}) == len(scene.things)
        pixels = np.asarray(draw_scene(scene)).astype(int)
        for t in scene.things:
            row, column = divmod(t.place, 3)
            assert column / 3 <= t.x - t.size / 2 and t.x + t.size / 2 <= (column + 1) / 3
            assert row / 3 <= t.y - t.size / 2 and t.y + t.size / 2 <= (row + 1) / 3
            centre = pixels[int(t.y * scene.side_px), int(t.x * scene.side_px)]
            distance = {name: np.abs(centre - value).sum() for name, value in COLOURS.items()}
            assert min(distance, key=distance.get) == t.colour


def test_training_and_heldout_arrangements_never_meet():
    rng = np.random.default_rng(2)
    training = {sample_scene(rng).arrangement for _ in range(2000)}
    heldout = {sample_scene(rng, heldout=True).arrangement for _ in range(500)}
    assert not training & heldout
    assert all(is_heldout(a) for a in heldout)


def _scene(*things):
    return Scene(tuple(Thing(c, s, PLACES.index(p), 0.5, 0.5, 0.2, 0.0) for c, s, p in things), "plain", 64, 0)


@pytest.mark.parametrize(
    ("kind", "form", "answer"),
    [
        ("existence", ("existence", "red circle"), "yes"),
        ("existence", ("existence", "blue circle"), "no"),
        ("count", ("count", "circles"), "two"),
        ("count", ("count", "shapes"), "three"),
        ("colour", ("colour", "square"), "red"),
        ("shape", ("shape", "green thing"), "circle"),
        ("position", ("position", "green circle"), "bottom right"),
        ("relation", ("relation", "red circle", "left of", "green circle"), "yes"),
        ("relation", ("relation", "red circle", "below", "green circle"), "no"),
    ],
)
def test_answers_of_a_known_scene(kind, form, answer):
    scene = _scene(("red", "circle", "top left"), ("red", "square", "top"), ("green", "circle", "bottom right"))
    answers = {q.form: q.answer for q in all_questions(scene, kind)}
    assert answers[form] == answer


def test_ambiguous_questions_are_not_asked():
    scene = _scene(("red", "circle", "top left"), ("red", "circle", "top"), ("blue", "circle", "bottom left"))
    forms = {q.form for kind in KINDS for q in all_questions(scene, kind)}
    assert ("colour", "circle") not in forms
    assert ("position", "red circle") not in forms
    assert ("relation", "red circle", "above", "blue circle") not in forms


def test_no_turn_is_answered_by_the_turns_before_it():
    rng = np.random.default_rng(3)
    balance = Balance(form_slack=2, kind_slack=100)
    for _ in range(200):
        known = set()
        for question in conversation(sample_scene(rng), 8, balance, rng):
            assert not question.revealed or not question.revealed <= known
            known |= question.given | question.revealed
