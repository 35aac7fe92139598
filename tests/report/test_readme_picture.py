"""The pictures of the README and the documentation are of the page that this version draws."""

from pathlib import Path

import pytest
from PIL import Image

from maporl.report.page import page_version

IMAGES = Path(__file__).parents[2] / "docs/images"


@pytest.mark.parametrize("name", ["report.png", "dialogues.png"])
def test_a_picture_shows_the_page_of_this_version(name):
    with Image.open(IMAGES / name) as picture:
        assert picture.text.get("page") == page_version(), f"{name} shows another page; make picture takes it again"
        assert picture.width == 1280
