"""The tests of DistributedOptimizer again where ``torch.set_default_device`` is a device."""

from __future__ import annotations

import pytest

from ranks.optimizer.test_distributed import *  # noqa: F403
from ranks.optimizer.test_lifetime import *  # noqa: F403
from ranks.optimizer.test_local_steps import *  # noqa: F403
from ranks.optimizer.test_options import *  # noqa: F403

pytestmark = [pytest.mark.sizes(2), pytest.mark.usefixtures("default_device")]

USUAL = {
    "test_a_gradient_that_turns_out_to_be_sparse",
    "test_a_table_that_one_rank_uses_is_sparse_from_the_first_step_on",
}
"""What runs without being asked for slow tests."""

NOT_HERE = {
    "test_a_rank_that_had_joined_goes_on_with_the_others": "who joins before it has used its GPU sends all ranks "
    "through CPU memory, and a warning says so",
    "test_rounding_to_bytes_does_not_add_up": "it makes its tensors in CPU memory, where bytes are made",
}
"""By name, or by name and parameters: why a test is left out."""

NOT_PRETENDED = {
    **dict.fromkeys(
        (
            "test_a_state_dict_of_a_round_continues_bit_by_bit",
            "test_a_checkpoint_waits_for_the_sync",
            "test_a_rank_that_comes_late_to_an_elastic_job",
        ),
        "torch swaps parameters of a class in Python when it loads them, and cannot where an optimizer knows them",
    ),
    **dict.fromkeys(
        (
            "test_an_interrupt_at_a_random_moment_leaves_the_common_weights_equal",
            "test_memory_is_flat_over_many_optimizers_and_generations",
        ),
        "a device in Python takes minutes for so many steps",
    ),
}
"""The same where there is no GPU."""
