"""The order of samples follows from the seed and the step's number alone."""

import itertools

import pytest
import torch

from llava_ds.data.sampler import epoch_order, step_samples, steps_per_epoch


def take(count: int, *args, **more) -> list[list[int]]:
    return list(itertools.islice(step_samples(*args, **more), count))


@pytest.mark.parametrize(("num_samples", "batch_size"), [(12, 4), (13, 4), (3, 8), (1, 1), (100, 7)])
def test_every_epoch_is_a_permutation_in_steps_of_the_batch_size(num_samples, batch_size):
    per_epoch = steps_per_epoch(num_samples, batch_size)
    steps = take(3 * per_epoch, num_samples, batch_size, seed=5)
    for epoch in range(3):
        mine = steps[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(itertools.chain(*mine)) == list(range(num_samples))
        assert all(len(step) == batch_size for step in mine[:-1]) and 1 <= len(mine[-1]) <= batch_size
        assert list(itertools.chain(*mine)) == epoch_order(num_samples, 5, epoch)


def test_epochs_and_seeds_differ():
    orders = {tuple(epoch_order(50, seed, epoch)) for seed in (0, 100) for epoch in range(4)}
    assert len(orders) == 8


@pytest.mark.parametrize("start_step", [1, 3, 4, 5, 9, 23])
def test_starting_at_a_step_equals_skipping_to_it(start_step):
    assert take(6, 13, 4, seed=1, start_step=start_step) == take(start_step + 6, 13, 4, seed=1)[start_step:]


def test_the_order_does_not_depend_on_the_global_generator():
    torch.manual_seed(1)
    one = take(5, 13, 4, seed=1)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert take(5, 13, 4, seed=1) == one
    assert torch.equal(torch.get_rng_state(), before)
