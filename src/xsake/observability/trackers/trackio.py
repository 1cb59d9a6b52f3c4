"""trackio: a local database; view it with `trackio show`."""

import json
from collections.abc import Mapping
from typing import Any

from xsake.errors import MissingExtraError
from xsake.observability.trackers import RunInfo


class TrackioTracker:
    """A trackio run in trackio's default folder.

    Args:
        run: description of the run.
    """

    def __init__(self, run: RunInfo):
        try:
            import trackio
        except ImportError as error:
            raise MissingExtraError(
                "trackio is not installed", fix="pip install 'xsake[trackers]'"
            ) from error
        self._run: Any = trackio.init(
            project=run.project, name=run.name, resume="allow", embed=False,
            auto_log_cpu=False, auto_log_gpu=False,
            config=json.loads(run.settings),
        )  # fmt: skip

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self._run.log(dict(values), step=step)

    def finish(self) -> None:
        """See `Tracker`."""
        self._run.finish()
