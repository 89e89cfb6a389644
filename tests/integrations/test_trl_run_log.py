"""The folder of a run that another trainer trains."""

import io
from contextlib import closing

from rich.console import Console

from klinic.integrations.trl.run_log import TRLRunLog
from klinic.report.live import Phase, RunWatcher


def test_an_attached_run_records_its_end(tmp_path):
    keeper = TRLRunLog(tmp_path, doctor="none", console=Console(file=io.StringIO()))
    keeper.begin_trl_run({}, {}, {})
    keeper.record_metrics(3, {"reward": 0.5})
    with closing(RunWatcher(tmp_path)) as follower:
        assert follower.take_snapshot().phase is Phase.GOING
        keeper.end_run(3)
        assert follower.take_snapshot().phase is Phase.ENDED
