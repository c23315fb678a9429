"""The tests of the collectives as users call them, again where ``torch.set_default_device`` is a device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from harness.pretended_gpu import NAME
from ranks.collectives.test_gather_scatter import *  # noqa: F403
from ranks.collectives.test_gradients import *  # noqa: F403
from ranks.collectives.test_moving import *  # noqa: F403
from ranks.collectives.test_reducing import *  # noqa: F403

# One size: what differs by it they try in host memory.
pytestmark = pytest.mark.sizes(3, slow=(1, 2, 4))

NOT_HERE = {
    "test_allreduce_forms_agree": "a handle that was synchronized need not be done on a device",
    "test_allgather_averages_what_the_ranks_say": "the pretended device has no arange",
    "test_a_sign_that_is_not_in_memory": "nor lazy signs",
    "test_sparse_allreduce": "nor sparse tensors",
    "test_what_a_joined_rank_does_not_serve_fails_on_all_and_leaves_them_in_step[np3-sparse]": "nor these",
}
"""By name, or by name and parameters: why a test is left out."""


@pytest.fixture(autouse=True)
def _on_device(device: torch.device, request: pytest.FixtureRequest) -> Iterator[None]:
    why = NOT_HERE.get(request.node.name) or NOT_HERE.get(request.function.__name__)
    if why and device.type == NAME:
        pytest.skip(why)
    torch.set_default_device(device)
    yield
    torch.set_default_device(None)
