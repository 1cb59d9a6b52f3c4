"""trackio: a local database that needs no account; `trackio show` draws it."""

import json
from collections.abc import Mapping
from typing import Any

from xsake.errors import MissingExtraError
from xsake.observability.trackers import Subject


class TrackioTracker:
    """A run of trackio, in the folder that trackio keeps its databases in.

    Args:
        subject: the run.
    """

    def __init__(self, subject: Subject):
        try:
            import trackio
        except ImportError as error:
            raise MissingExtraError(
                "trackio is not installed", fix="pip install 'xsake[trackers]'"
            ) from error
        self._run: Any = trackio.init(
            project=subject.project, name=subject.name, resume="allow", embed=False,
            auto_log_cpu=False, auto_log_gpu=False,
            config=json.loads(subject.settings),
        )  # fmt: skip

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self._run.log(dict(values), step=step)

    def finish(self) -> None:
        """See `Tracker`."""
        self._run.finish()
