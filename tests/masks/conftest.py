import jaxtyping
import pytest


@pytest.fixture
def unchecked_types():
    """Calls as in production, where no type checker stands before our own checks."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
