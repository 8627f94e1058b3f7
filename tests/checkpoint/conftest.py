"""What tests of this folder share."""

import pytest
from support.saved import step_for, trained


@pytest.fixture(scope="module")
def trained_state():
    """(A step on one device, its state after three batches), which no test donates."""
    step = step_for(0, 1)
    return step, trained(step)
