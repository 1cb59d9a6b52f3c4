"""An alarm of a run: rings while saves fail, and ends."""

from xsake.training.checkpointing import CheckpointStore, SaveFailure
from xsake.training.metrics_logger import SaveFailureCounter


def test_an_alarm_rings_until_a_later_step_is_saved(tmp_path):
    store, alarm = CheckpointStore(tmp_path), SaveFailureCounter()
    (tmp_path / "10").mkdir()
    assert alarm.count(store) == 0
    for step in (20, 30):
        alarm.record_failure(SaveFailure(step, "no room", OSError("no room"), is_committed=False))
    assert alarm.count(store) == 2
    (tmp_path / "40").mkdir()
    assert alarm.count(store) == 0
    store.close()
