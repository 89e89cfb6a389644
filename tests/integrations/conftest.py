import pytest


@pytest.fixture(scope="module")
def taught(tmp_path_factory, warm_starts):
    """A start that writes sums and ends them."""
    from integrations.trainers import teach_start

    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("KLINIC_CACHE", str(warm_starts))
        return teach_start(tmp_path_factory.mktemp("taught"))
