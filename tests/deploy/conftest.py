from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ttvd.data.digits import split_digits


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eighty real digits as an array and as pictures."""
    place = tmp_path_factory.mktemp("digits")
    images = (split_digits()[2][:80, 0] * 255).byte().numpy()
    np.save(place / "digits.npy", images)
    (place / "pictures" / "deep").mkdir(parents=True)
    for number, image in enumerate(images):
        folder = place / "pictures" / ("deep" if number % 2 else ".")
        Image.fromarray(image).save(folder / f"{number:03}.png")
    return place
