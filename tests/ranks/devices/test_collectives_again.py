"""The tests of the collectives as users call them, again where ``torch.set_default_device`` is a device."""

from __future__ import annotations

import pytest

from ranks.collectives.test_gather_scatter import *  # noqa: F403
from ranks.collectives.test_gradients import *  # noqa: F403
from ranks.collectives.test_moving import *  # noqa: F403
from ranks.collectives.test_reducing import *  # noqa: F403

# One size: what differs by it they try in host memory.
pytestmark = [pytest.mark.sizes(2, slow=(1, 3, 4)), pytest.mark.usefixtures("default_device")]

USUAL = {
    "test_allgather_of_uneven_rows",
    "test_allreduce",
    "test_allreduce_reduces_every_dtype",
    "test_alltoall_with_and_without_splits",
    "test_broadcast_forms",
    "test_compression",
    "test_disagreement_raises_on_every_rank_and_the_job_goes_on",
    "test_gather_and_scatter",
    "test_grouped_allreduce_forms_agree_over_mixed_dtypes_and_shapes",
    "test_reducescatter_of_uneven_rows",
    "test_sync_batch_norm_equals_batch_norm_of_the_joined_batch",
}
"""What runs without being asked for slow tests: each operation once."""

NOT_HERE = {"test_allreduce_forms_agree": "a handle that was synchronized need not be done on a device"}
"""By name, or by name and parameters: why a test is left out."""

NOT_PRETENDED = {"test_a_sign_that_is_not_in_memory": "the pretended device has no lazy signs"}
"""The same where there is no GPU."""
