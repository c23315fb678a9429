"""The tests of prepare and of what goes with it again where ``torch.set_default_device`` is a device."""

from __future__ import annotations

import pytest

from ranks.training.test_data import *  # noqa: F403
from ranks.training.test_prepared_loops import *  # noqa: F403
from ranks.training.test_state import *  # noqa: F403

pytestmark = [pytest.mark.sizes(2), pytest.mark.usefixtures("default_device")]

USUAL = {
    "test_torchs_sync_batch_norm_is_converted",
    "test_what_reduces_no_gradients_is_refused",
}
"""What runs without being asked for slow tests."""

_SAMPLERS = "torch's own samplers draw from generators of the CPU, which a default device refuses"

NOT_HERE = {
    "test_sampler_joins_to_the_batches_of_one_process_and_shuffles_again": _SAMPLERS,
    "test_empty_is_a_tensor_in_ring_memory": "ring memory is the host's",
}
"""By name, or by name and parameters: why a test is left out."""

_CLASS = "its tensors have a class of their own"
_FSDP2 = "it has no streams with a priority, which FSDP2 takes"

NOT_PRETENDED = {
    "test_broadcast_parameters_takes_a_dict_in_any_order_and_refuses_what_is_no_tensor": _CLASS,
    "test_save_and_load": _CLASS,
    "test_save_gathers_what_is_sharded": _FSDP2,
    "test_save_refuses_what_is_sharded_inside_another_object": _FSDP2,
    "test_an_elastic_state_refuses_what_is_sharded": _FSDP2,
    "test_a_broadcast_that_is_refused_changes_nothing": _FSDP2,
}
"""The same where there is no GPU."""
