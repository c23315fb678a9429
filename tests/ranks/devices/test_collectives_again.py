"""The tests of the collectives as users call them, again where ``torch.set_default_device`` is a device."""

from __future__ import annotations

import pytest

from ranks.collectives.test_gather_scatter import *  # noqa: F403
from ranks.collectives.test_gradients import *  # noqa: F403
from ranks.collectives.test_moving import *  # noqa: F403
from ranks.collectives.test_reducing import *  # noqa: F403

# One size: what differs by it they try in host memory.
pytestmark = [pytest.mark.sizes(3, slow=(1, 2, 4)), pytest.mark.usefixtures("default_device")]

NOT_HERE = {"test_allreduce_forms_agree": "a handle that was synchronized need not be done on a device"}
"""By name, or by name and parameters: why a test is left out."""

NOT_PRETENDED = {"test_a_sign_that_is_not_in_memory": "the pretended device has no lazy signs"}
"""The same where there is no GPU."""
