"""Metrics lines and run folders that were made to harm a reader."""

import json
import os

BIG = "1" + "0" * 400  # an integer that no float holds
GOOD = "".join(json.dumps({"step": i, "loss": 1.0 + i, "wall": 1.0}) + "\n" for i in range(5))

# name: (lines, how many are dropped, how many values of other lines are dropped)
LINES: dict[str, tuple[str | bytes, int, int]] = {
    "ended with a step that is a word": ('{"event":"ended","ending":"done","step":"x"}\n', 0, 1),
    "event null": ('{"event":null,"from_step":1}\n', 1, 0),
    "unknown event, step a word": ('{"event":"foo","from_step":1,"step":"x"}\n', 1, 0),
    "unknown event, step 1e308": ('{"event":"foo","from_step":1,"step":1e308}\n', 1, 0),
    "unknown event, step huge": (f'{{"event":"foo","from_step":1,"step":{BIG}}}\n', 1, 0),
    "unknown event, step negative": ('{"event":"foo","from_step":1,"step":-7}\n', 1, 0),
    "event a list": ('{"event":["began"],"from_step":1}\n', 1, 0),
    "wall huge": (f'{{"step":1,"wall":{BIG}}}\n', 0, 1),
    "loss a huge integer": (f'{{"step":1,"loss":{BIG}}}\n', 0, 1),
    "loss a huge float": ('{"step":1,"loss":1e400}\n', 0, 1),
    "loss NaN and Infinity": ('{"step":1,"loss":NaN}\n{"step":2,"loss":Infinity}\n', 0, 2),
    "loss of 5000 digits": (f'{{"step":1,"loss":{"9" * 5000}}}\n', 1, 0),
    "loss a word": ('{"step":1,"loss":"<script>"}\n', 0, 1),
    "loss an object": ('{"step":1,"loss":{"a":1}}\n', 0, 1),
    "loss true": ('{"step":1,"loss":true}\n', 0, 0),
    "matrix of a huge integer": (f'{{"step":1,"entropy":[[{BIG}]]}}\n', 0, 1),
    "matrix of words": ('{"step":1,"entropy":[["x"]]}\n', 0, 1),
    "matrix with rows of two lengths": ('{"step":1,"entropy":[[1],[1,2]]}\n', 0, 1),
    "matrix too deep": ('{"step":1,"entropy":[[[1]]]}\n', 0, 1),
    "matrix of null": ('{"step":1,"entropy":[[null]]}\n', 0, 0),
    "matrix of 513 heads": (f'{{"step":1,"entropy":{json.dumps([[0.0] * 513] * 2)}}}\n', 0, 1),
    "steps huge": (f'{{"event":"began","from_step":0,"steps":{BIG}}}\n', 0, 1),
    "name a script": ('{"event":"began","from_step":0,"name":"<script>1</script>"}\n', 0, 1),
    "name with a newline": ('{"event":"began","from_step":0,"name":"a\\nb"}\n', 0, 1),
    "name that ends with a newline": ('{"event":"began","from_step":0,"name":"abc\\n"}\n', 0, 1),
    "deep": ('{"step":1,"x":' + "[" * 100_000 + "]" * 100_000 + "}\n", 1, 0),
    "steps that go back": (
        '{"step":1000000,"loss":1}\n{"step":1,"loss":1}\n{"step":500000,"loss":1}\n', 7, 0,
    ),
    "step 2**53 - 1": ('{"step":9007199254740991,"loss":1}\n{"step":0,"loss":1}\n', 6, 0),
    "step twice": ('{"step":1,"step":"x","loss":1}\n', 1, 0),
    "a million names": (
        '{"step":1,' + ",".join(f'"c{i}":1' for i in range(1_000_000)) + "}\n", 0, 0,
    ),
    "matrix of a million": (f'{{"step":1,"entropy":{json.dumps([[1.0] * 1000] * 1000)}}}\n', 0, 1),
    "half a character": ('{"step":1,"loss":1,"note":"\\ud800"}\n', 0, 0),
    "not UTF-8": (b'{"step":1,"loss":1,"note":"\xff\xfe"}\n', 1, 0),
    "zeros": (b"\0" * 100_000 + b"\n", 1, 0),
    "20 MB without a newline": (b"x" * (20 * 2**20), 1, 0),
    "began without a step": ('{"event":"began"}\n', 1, 0),
    "is_skipped a word": ('{"step":1,"is_skipped":"yes"}\n', 0, 1),
    "tokens_per_second NaN": ('{"step":1,"tokens_per_second":NaN}\n', 0, 1),
    "step negative": ('{"step":-1,"loss":1}\n', 1, 0),
}  # fmt: skip


def _link_index(folder, victim):
    """An index of 0.1.0, which is no longer used, somewhere else."""
    victim.mkdir()
    (victim / "precious.txt").write_text("x")
    (folder / "metrics.index").symlink_to(victim)


def _link_buckets(folder, victim):
    victim.write_text("precious " * 1000)
    (folder / "metrics.index").mkdir()
    (folder / "metrics.index" / "index.json").write_text("[" * 200_000 + "]" * 200_000)
    (folder / "metrics.index" / "fine-64.buckets").symlink_to(victim)
    (folder / "metrics.index.lock").symlink_to(victim)


def _pipes(folder, victim):
    for name in ("goodput.jsonl", "config.json", "metrics.index.lock"):
        os.mkfifo(folder / name)


def _overflow(folder, victim):
    begins = '{"life":"begins","wall":1e308}\n' * 5
    more = '{"life":"goes on","wall":1.0,"seconds":{"step":1e308,"init":1e308}}\n' * 3
    (folder / "goodput.jsonl").write_text(begins + more)


def _config(text):
    return lambda folder, victim: (folder / "config.json").write_text(text)


# name: plants something in the folder of a run, or next to it
FOLDERS = {
    "index a link": _link_index,
    "buckets a link": _link_buckets,
    "pipes": _pipes,
    "goodput beyond all numbers": _overflow,
    "config.json: deep": _config('{"a":' + "[" * 900 + "]" * 900 + "}"),
    "config.json: huge integer": _config(f'{{"a":{BIG}}}'),
}
