"""The folder of a run that another trainer trains."""

import io
from contextlib import closing

from rich.console import Console

from klinic.integrations.trl.keeping import Keeper
from klinic.report.live import Follower, Phase


def test_an_attached_run_records_its_end(tmp_path):
    keeper = Keeper(tmp_path, doctor="none", console=Console(file=io.StringIO()))
    keeper.begin({}, {}, {})
    keeper.tell(3, {"reward": 0.5})
    with closing(Follower(tmp_path)) as follower:
        assert follower.look().phase is Phase.GOING
        keeper.end(3)
        assert follower.look().phase is Phase.ENDED
