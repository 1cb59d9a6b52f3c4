"""Runs that are killed while they save: the newest committed step is restored, exactly."""

import json
import random
import subprocess
import sys
import textwrap

import pytest

from tests.training import checkpoint_sample as sample
from xsake.training.checkpointing import CheckpointStore

LIKE = sample.like()

# The parent never starts a backend: it imports once, and each child that it forks is a run of its
# own, which saves until it is killed.
RUNS = textwrap.dedent("""
    import json, os, pathlib, random, signal, sys, time, warnings
    warnings.simplefilter("ignore")
    import jax
    from tests.training import checkpoint_sample as sample
    from xsake.training import checkpointing, verify
    from xsake.training.checkpointing import CheckpointStore

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    def saving(folder, moment):
        if moment == "before the commit":
            begin = checkpointing.start_save
            def dying(path, *rest):
                if path.name == "3":
                    die()
                return begin(path, *rest)
            checkpointing.start_save = dying
        if moment == "before the manifest":
            write = verify.write_manifest
            verify.write_manifest = lambda path, *rest: (
                die() if path.name == "3" else write(path, *rest))
        if moment == "in the manifest":
            replace = pathlib.Path.replace
            pathlib.Path.replace = lambda self, target: (
                die() if self.name == ".3.manifest" else replace(self, target))
        if moment == "while deleting":
            verify.shutil.rmtree = lambda path, **_: die() if path.exists() else None
        store = CheckpointStore(folder, max_to_keep=2)
        for step in range(1, 10_000):
            store.save(step, sample.tree(step), sample.extra(step))

    for number, moment in enumerate(json.loads(sys.argv[2])):
        folder = pathlib.Path(sys.argv[1], str(number))
        child = os.fork()
        if not child:
            try:
                saving(folder, moment)
            finally:
                os._exit(1)
        if isinstance(moment, float):
            while not (folder / "2").exists():
                assert os.waitpid(child, os.WNOHANG) == (0, 0), "the run ended by itself"
                time.sleep(0.01)
            time.sleep(moment)
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
    print("all were killed")
""")


def killed_runs(folder, moments):
    command = [sys.executable, "-c", RUNS, str(folder), json.dumps(moments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "all were killed" in done.stdout, done.stderr[-3000:]
    return [folder / str(number) for number in range(len(moments))]


def assert_newest_is_restored(folder):
    """The newest step with its final name, exactly; and the run can go on from it."""
    newest = max(int(path.name) for path in folder.iterdir() if path.name.isdecimal())
    watcher = sample.Watcher()
    store = CheckpointStore(folder, max_to_keep=2, **watcher.options())
    sample.assert_exact(store.restore(LIKE), newest)
    assert all(notice.kind == "repaired" for notice in watcher.notices)
    store.save(newest + 1, sample.tree(newest + 1), sample.extra(newest + 1))
    store.close()
    sample.assert_exact(CheckpointStore(folder).restore(LIKE), newest + 1)
    assert all(path.name.isdecimal() for path in folder.iterdir())
    return newest, [notice.kind for notice in watcher.notices]


def test_a_run_that_is_killed_at_any_moment_restores_its_newest_committed_step(tmp_path):
    moments = ["before the commit", "before the manifest", "in the manifest", "while deleting", 0.1]
    found = [assert_newest_is_restored(folder) for folder in killed_runs(tmp_path, moments)]
    assert found[:4] == [(2, []), (3, ["repaired"]), (3, ["repaired"]), (3, [])]


@pytest.mark.slow
def test_twenty_runs_that_are_killed_at_random_moments_restore_their_newest_step(tmp_path):
    drawn = random.Random(0)
    moments = [drawn.uniform(0.0, 2.0) for _ in range(20)]
    for folder in killed_runs(tmp_path, moments):
        assert_newest_is_restored(folder)
