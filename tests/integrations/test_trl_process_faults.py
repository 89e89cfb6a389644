"""Twelve faults of TRL in two processes, four of them in one process only: which are named.

pytest -m slow -s tests/integrations/test_trl_process_faults.py
"""

import sys

import pytest

pytest.importorskip("trl")

from integrations.trl_launch import FAULT_CAUSES, count_named, launch_faults

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_eleven_of_twelve_faults_are_named_and_none_wrongly(layout, taught, tmp_path):
    causes = launch_faults(tmp_path, taught, layout)
    sys.stdout.write(f"{layout}: {causes}\n")
    assert len(FAULT_CAUSES) == 12
    num_named, wrong = count_named(causes)
    assert not wrong, wrong
    assert num_named >= 11, causes
