"""Pictures: exact in characters, and PNG files that show what they should."""

import sys

import numpy as np
import pytest

from tests.masks import examples
from xsake.errors import ArgumentError, MissingExtraError
from xsake.masks import Causal, Explicit, FromFunction, Full, Longformer, PerHead, Sinks, Window
from xsake.masks.draw import coverage_cells


@pytest.mark.parametrize(
    ("mask", "sizes", "width", "picture"),
    [
        (Causal() & (Window(left=2, right=0) | Sinks(1)), (6, 8), 64, """
            #.......
            ##......
            ###.....
            ####....
            #.###...
            #..###..
        """),
        (Longformer(window=8, global_tokens=8), (64,), 16, """
            ################
            ####++..........
            ##++##++........
            ##..++##++......
            ##....++##++....
            ##......++##++..
            ##........++##++
            ##..........++##
        """),
        (PerHead([Causal(), Full()]), (2,), 64, """head 0  #. ##  head 1  ## ##"""),
    ],
    ids=["streaming window", "merged cells", "heads"],
)  # fmt: skip
def test_golden_pictures(mask, sizes, width, picture):
    assert mask.to_ascii(*sizes, width=width).split() == picture.split()


def test_one_head_is_shown_alone():
    assert PerHead([Causal(), Full()]).to_ascii(2, head=0) == "#.\n##"


def test_pictures_of_unknown_masks_look_at_tokens():
    table = np.zeros((64, 64), bool)
    table[:32, :32] = True
    table[40, 3] = True
    for mask in (Explicit(table), FromFunction(lambda q, kv: (q < 32) & (kv < 32))):
        lines = mask.to_ascii(64, width=4).splitlines()
        assert lines[0] == "##.."
    assert Explicit(table).to_ascii(64, width=4).splitlines() == ["##..", "+..."]


@pytest.mark.parametrize("mask", examples.HEADLESS, ids=repr)
def test_cells_of_one_token_are_the_mask(mask):
    cells = coverage_cells(mask, 20, 24, rows=20, columns=24)
    expected = mask.allows(np.arange(20)[:, None], np.arange(24))
    np.testing.assert_array_equal(cells, np.where(expected, 2, 0))


@pytest.mark.parametrize("mask", examples.ALL, ids=repr)
def test_print_shows_the_repr_and_a_small_picture(mask):
    first, *picture, note = str(mask).splitlines()
    assert first == repr(mask)
    assert 1 <= len(picture) <= 16 and max(map(len, picture)) <= 32
    assert note.endswith("# all, + some, . none")


@pytest.mark.parametrize(("sizes", "width"), [((0, 3), 64), ((3, 0), 64), ((3,), 1)])
def test_sizes_are_checked(sizes, width):
    with pytest.raises(ArgumentError):
        Causal().to_ascii(*sizes, width=width)


def test_png_shows_two_colours(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "mask.png"
    (Causal() & Window(left=40, right=0)).draw(path, 256)
    pixels = image.imread(path)[..., :3]
    colours, counts = np.unique(pixels.reshape(-1, 3), axis=0, return_counts=True)
    main = colours[np.argsort(counts)[-3:]]  # ink, paper and the white around them
    assert counts.max() < 0.9 * counts.sum() and len(np.unique(main, axis=0)) == 3


def test_png_of_heads_is_a_grid(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    PerHead([Causal(), Full(), Sinks(2)]).draw(tmp_path / "heads.png", 24, 32)
    assert min(image.imread(tmp_path / "heads.png").shape[:2]) > 300
    with pytest.raises(ArgumentError, match="XSK-102.draw-heads"):
        PerHead([Causal()] * 65).draw(tmp_path / "heads.png", 8)


def test_png_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'xsake\[viz\]'"):
        Causal().draw(tmp_path / "mask.png", 8)
