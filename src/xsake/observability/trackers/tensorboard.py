"""TensorBoard: event files in the run's folder, written without TensorFlow."""

from collections.abc import Mapping
from typing import Any

from xsake.errors import MissingExtraError
from xsake.observability.trackers import Subject


class TensorBoardTracker:
    """Event files, for `tensorboard --logdir`.

    Args:
        subject: the run.
    """

    def __init__(self, subject: Subject):
        try:
            import tensorboardX
        except ImportError as error:
            raise MissingExtraError(
                "tensorboardX is not installed", fix="pip install 'xsake[trackers]'"
            ) from error
        self._writer: Any = tensorboardX.SummaryWriter(str(subject.folder / "tensorboard"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def finish(self) -> None:
        """See `Tracker`."""
        self._writer.close()
