"""TensorBoard event files in the run's folder, written without TensorFlow."""

import time
from collections.abc import Mapping
from typing import Any

from xsake.errors import MissingExtraError
from xsake.observability.trackers import RunInfo


class TensorBoardTracker:
    """Event files for `tensorboard --logdir`.

    Args:
        run: description of the run.
    """

    def __init__(self, run: RunInfo):
        try:
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto import event_pb2
        except ImportError as error:
            raise MissingExtraError(
                "tensorboardX is not installed", fix="pip install 'xsake[trackers]'"
            ) from error
        folder = run.folder / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        # SummaryWriter adds another thread and a pipe; this class already runs in a worker thread.
        self._messages: Any = event_pb2
        self._writer = EventsWriter(str(folder / "events"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        event = self._messages.Event(wall_time=time.time(), step=step)
        for name, value in values.items():
            event.summary.value.add(tag=name, simple_value=value)
        self._writer.write_event(event)
        self._writer.flush()

    def finish(self) -> None:
        """See `Tracker`."""
        self._writer.close()
