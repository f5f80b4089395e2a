"""Images that are loaded ahead: the same numbers in the same order, errors when due, threads that end, flat memory."""

import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from tests.helpers.data import write_class_folders
from ttvd.data.loading import THREAD_NAME, Batch, Request, count_decoders, load_batches, prefetch, to_floats
from ttvd.data.sets import ImageFolder, from_arrays

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    ),
]
PATIENCE = 20.0
"""Seconds after which something hangs."""


class Slow:
    """Pictures that show their number, each of which takes its time."""

    def __init__(self, seconds: Sequence[float], broken: Sequence[int] = ()) -> None:
        self.seconds, self.broken = seconds, frozenset(broken)
        self.started: list[int] = []

    def pixels(self, position: int) -> Tensor:
        self.started.append(position)
        time.sleep(self.seconds[position])
        if position in self.broken:
            raise ValueError(f"picture {position} is broken")
        return torch.full((1, 2, 2), position, dtype=torch.uint8)


def ask(source: object, batches: Sequence[Sequence[int]]) -> Iterator[Request]:
    return ((source, torch.tensor(rows)) for rows in batches)  # type: ignore[misc]


def list_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(THREAD_NAME)]


def finish(work: Callable[[], None]) -> None:
    """Do some work in a thread; fails if it hangs."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "it hangs"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ImageFolder:
    root = tmp_path_factory.mktemp("pictures")
    for number, suffix in enumerate(["png", "jpg", "bmp", "png", "jpg", "webp", "png"]):
        path = root / f"n{number % 3}" / f"{number}.{suffix}"
        path.parent.mkdir(exist_ok=True)
        size = (40 + 3 * number, 48, 3)
        Image.fromarray(np.random.default_rng(number).integers(0, 256, size, np.uint8)).save(path)
    return ImageFolder(root, 32, 24)


def decode(folder: ImageFolder, position: int) -> Tensor:
    """A picture by Pillow and numpy alone."""
    with Image.open(folder.root / folder.path(position)) as file:
        picture = file.convert("RGB")
    short = min(picture.size)
    picture = picture.resize(
        (32 * picture.width // short, 32 * picture.height // short), Image.Resampling.BILINEAR
    )
    left, top = round((picture.width - 24) / 2), round((picture.height - 24) / 2)
    pixels = np.array(picture.crop((left, top, left + 24, top + 24)), np.float32) / np.float32(255)
    return torch.from_numpy(pixels.transpose(2, 0, 1).copy())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("workers", [0, 1, 3, None])
def test_the_numbers_are_those_of_floats_bit_for_bit(
    device: str, workers: int | None, folder: ImageFolder
) -> None:
    batches = [[5, 0, 3], [3, 3, 1], [6], [2, 4]]
    found = list(prefetch(ask(folder, batches), device, workers=workers))
    for rows, images in zip(batches, found, strict=True):
        assert images.device.type == device
        assert images.dtype == torch.float32
        assert torch.equal(images.cpu(), torch.stack([decode(folder, row) for row in rows]))
        assert torch.equal(images.cpu(), folder.floats(rows))


@pytest.mark.parametrize("device", DEVICES)
def test_every_byte_becomes_the_nearest_float(device: str) -> None:
    every = np.arange(256, dtype=np.uint8)
    expected = (every.astype(np.float64) / 255).astype(np.float32)
    assert to_floats(torch.from_numpy(every).to(device)).cpu().numpy().tolist() == expected.tolist()


def test_pixels_of_a_folder_are_the_bytes_of_the_picture(tmp_path: Path) -> None:
    (tmp_path / "n0").mkdir()
    pixels = np.arange(768, dtype=np.int64).astype(np.uint8).reshape(16, 16, 3)
    Image.fromarray(pixels).save(tmp_path / "n0" / "all.png")
    found = ImageFolder(tmp_path, None, None).pixels(0)
    assert found.dtype == torch.uint8
    assert found.permute(1, 2, 0).tolist() == pixels.tolist()


@settings(deadline=None, max_examples=40)
@given(data=st.data(), workers=st.integers(0, 5), ahead=st.integers(1, 4))
def test_the_order_does_not_depend_on_timing(data: st.DataObject, workers: int, ahead: int) -> None:
    seconds = data.draw(st.lists(st.sampled_from([0.0, 0.0, 0.001, 0.004]), min_size=1, max_size=12))
    row = st.integers(0, len(seconds) - 1)
    batches = data.draw(st.lists(st.lists(row, min_size=1, max_size=5), max_size=8))
    source, shown = Slow(seconds), 0
    for number, images in enumerate(prefetch(ask(source, batches), workers=workers, ahead=ahead)):
        assert (images[:, 0, 0, 0] * 255).round().int().tolist() == batches[number]
        assert len(source.started) <= sum(len(rows) for rows in batches[: number + ahead + 1])
        shown += 1
    assert shown == len(batches)
    assert len(source.started) == sum(map(len, batches))
    assert list_threads() == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("workers", [0, 1, 4])
def test_a_broken_picture_is_named_in_its_turn(device: str, workers: int, tmp_path: Path) -> None:
    (tmp_path / "n0").mkdir()
    for number in range(6):
        Image.new("RGB", (16, 16), (number, 0, 0)).save(tmp_path / "n0" / f"{number}.png")
    folder = ImageFolder(tmp_path, None, 8)
    for name in ("3.png", "5.png"):
        (tmp_path / "n0" / name).write_bytes(b"no picture")
    (tmp_path / "n0" / "4.png").unlink()
    for rows in ([0, 3, 5], [5, 3, 0], [1, 4]):
        stream = prefetch(ask(folder, [[0, 1], [2], rows, [1]]), device, workers=workers)
        assert len(next(stream)) == 2
        assert len(next(stream)) == 1
        with pytest.raises((ValueError, OSError)) as expected:
            folder.floats(rows)
        with pytest.raises((ValueError, OSError)) as found:
            next(stream)
        assert found.type is expected.type
        assert str(found.value) == str(expected.value)
        assert str(tmp_path) in str(found.value)
        assert list(stream) == []
        assert list_threads() == []


def test_the_first_of_two_errors_is_raised_even_if_it_comes_later() -> None:
    source = Slow([0.0, 0.05, 0.0], broken=[1, 2])
    with pytest.raises(ValueError, match="picture 1 is broken"):
        list(prefetch(ask(source, [[0, 1, 2]]), workers=3))


def test_pictures_of_two_sizes_are_refused_in_their_turn(tmp_path: Path) -> None:
    (tmp_path / "n0").mkdir()
    for number, side in enumerate((16, 16, 20)):
        Image.new("RGB", (side, side)).save(tmp_path / "n0" / f"{number}.png")
    folder = ImageFolder(tmp_path, None, None)
    stream = prefetch(ask(folder, [[0], [2], [0, 1], [1, 2]]), workers=2)
    shapes = []
    for _ in range(3):
        time.sleep(0.05)  # the threads are through with what they may do
        shapes.append(tuple(next(stream).shape))
    assert shapes == [(1, 3, 16, 16), (1, 3, 20, 20), (2, 3, 16, 16)]
    with pytest.raises(ValueError, match="different shapes"):
        next(stream)


def test_closing_early_ends_the_threads_without_the_rest_of_the_work() -> None:
    source = Slow([0.005] * 200)

    def work() -> None:
        stream = prefetch(ask(source, [range(start, start + 50) for start in range(0, 200, 50)]), workers=2)
        next(stream)
        stream.close()

    finish(work)
    assert list_threads() == []
    assert len(source.started) < 100


def test_a_stream_that_is_dropped_or_never_begun_leaves_no_thread() -> None:
    def work() -> None:
        prefetch(ask(Slow([0.0]), [[0]]))
        for _ in prefetch(ask(Slow([0.01] * 9), [[number] for number in range(9)]), workers=3):
            break

    finish(work)
    assert list_threads() == []


class Interrupting(Slow):
    """Sends Ctrl-C to the main thread while that waits for a picture."""

    def pixels(self, position: int) -> Tensor:
        if position == 1:
            time.sleep(0.1)  # all has been asked for, and the main thread waits
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return super().pixels(position)


def test_an_interrupt_ends_the_wait() -> None:
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals reach the main thread alone")
    source = Interrupting([0.0] + [0.3] * 99)
    start = time.monotonic()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background begin without
    try:
        with pytest.raises(KeyboardInterrupt):
            list(prefetch(ask(source, [range(100)]), workers=2))
    finally:
        signal.signal(signal.SIGINT, before)
    assert list_threads() == []
    assert time.monotonic() - start < PATIENCE
    assert len(source.started) < 10


def test_requests_are_drawn_a_little_ahead_from_an_endless_stream() -> None:
    drawn = 0

    def draw() -> Iterator[Request]:
        nonlocal drawn
        while True:
            drawn += 1
            yield Slow([0.0]), torch.tensor([0, 0])

    stream = prefetch(draw(), workers=2, ahead=3)
    for number in range(1, 30):
        next(stream)
        assert drawn == number + 3
    stream.close()


def test_what_makes_no_sense_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="workers = -1"):
        prefetch([], workers=-1)
    with pytest.raises(ValueError, match="ahead = 0"):
        prefetch([], ahead=0)
    assert list(prefetch([])) == []
    assert 1 <= count_decoders() <= 8


@pytest.fixture
def damaged(tmp_path: Path) -> ImageFolder:
    """Five images, the second of which is cut off."""
    write_class_folders(tmp_path)
    path = tmp_path / "n02" / "z.jpg"
    path.write_bytes(path.read_bytes()[:300])
    return ImageFolder(tmp_path, 32, 32)


def collect(batches: Iterable[Batch]) -> tuple[list[list[int]], Tensor]:
    found = list(batches)
    images = [batch.images for batch in found if batch.images is not None]
    return [batch.positions for batch in found], torch.cat(images)


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_images_stop_or_are_skipped(workers: int, damaged: ImageFolder) -> None:
    with pytest.raises(ValueError, match=r"two: .*z\.jpg cannot be used as a picture.*skip"):
        list(load_batches(damaged.pixels, range(5), 2, workers=workers, names=["one", "two"]))
    for size, expected in ((2, [[0], [2, 3], [4]]), (1, [[0], [], [2], [3], [4]])):
        batches = load_batches(damaged.pixels, range(5), size, workers=workers, on_unreadable="skip")
        found = list(batches)
        positions, images = collect(found)
        assert positions == expected
        assert torch.equal(images, damaged.floats([0, 2, 3, 4]))
        assert [position for batch in found for position, _ in batch.unreadable] == [1]
        assert found[-1].stop == 5
    assert list_threads() == []


def test_batches_follow_an_order_and_are_floats() -> None:
    images = from_arrays(torch.rand(5, 1, 8, 8), [0, 1, 2, 3, 4])
    positions, found = collect(load_batches(images.pixels, [4, 0, 3], 2))
    assert positions == [[4, 0], [3]]
    assert torch.equal(found, images.floats([4, 0, 3]))
    assert list(load_batches(images.pixels, [], 2)) == []


def test_images_of_another_shape_or_with_bad_values_are_unreadable() -> None:
    images = [torch.zeros(1, 8, 8), torch.zeros(1, 8, 9), torch.full((1, 8, 8), float("nan"))]
    batch = next(load_batches(images.__getitem__, range(3), 3, on_unreadable="skip"))
    assert batch.positions == [0]
    assert ["size (1, 8, 9)" in batch.unreadable[0][1], "NaN" in batch.unreadable[1][1]] == [True, True]
    with pytest.raises(ValueError, match=r"image 0: .*expected \(3, 8, 8\)"):
        list(load_batches(images.__getitem__, range(3), 3, shape=(3, 8, 8)))
    for odd in (torch.zeros(8, 8), torch.zeros(1, 8, 8, dtype=torch.int32)):
        with pytest.raises(ValueError, match=r"image 0: .*expected bytes or floats \(c, h, w\)"):
            list(load_batches([odd].__getitem__, [0], 1))
    with pytest.raises(ValueError, match="at least 1 image"):
        load_batches(images.__getitem__, range(3), 0)
    with pytest.raises(ValueError, match="'stop' or 'skip'"):
        load_batches(images.__getitem__, range(3), 1, on_unreadable="maybe")  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [0, 2])
def test_images_of_another_shape_are_dropped_as_soon_as_they_are_read(workers: int) -> None:
    kept: list[weakref.ref[Tensor]] = []

    def read(position: int) -> Tensor:
        if position == 0:
            raise ValueError("damaged")
        image = torch.zeros(1, 8, 8 if position == 1 or position % 16 == 0 else 9)
        if image.shape[2] == 9:
            kept.append(weakref.ref(image))
        return image

    found = 0
    for batch in load_batches(read, range(64), 16, workers=workers, on_unreadable="skip"):
        time.sleep(0.02)  # the threads are through with what they may do
        assert sum(image() is not None for image in kept) == 0
        found += len(batch.positions)
        assert all("size (1, 8, 9)" in reason or position == 0 for position, reason in batch.unreadable)
    assert found == 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_busy_device_gets_whole_batches_in_flat_memory() -> None:
    class Large:
        def pixels(self, position: int) -> Tensor:
            return torch.full((3, 256, 256), position % 251, dtype=torch.uint8)

    weights = torch.rand(4096, 4096, device="cuda")
    batches = [list(range(start, start + 16)) for start in range(0, 1600, 16)]
    sums, reserved = [], []
    for images in prefetch(ask(Large(), batches), "cuda", workers=4, ahead=3):
        for _ in range(5):  # the device falls behind
            weights = (weights @ weights).clamp_(0, 1)
        sums.append(images.double().mean((1, 2, 3)))
        reserved.append(torch.cuda.memory_reserved())
    values = torch.arange(1600, dtype=torch.float64).remainder(251).div(255)
    torch.testing.assert_close(torch.cat(sums).cpu(), values, rtol=0, atol=1e-7)
    assert reserved[-1] - reserved[10] < 2**26  # bytes of 90 batches are more than four times as much


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_belong_to_the_stream_that_asks() -> None:
    stream = torch.cuda.Stream()
    batches = [[number] * 64 for number in range(50)]
    with torch.cuda.stream(stream):
        found = [
            images.double().sum() for images in prefetch(ask(Slow([0.0] * 50), batches), "cuda", workers=2)
        ]
        stream.synchronize()
    expected = [number / 255 * 256 for number in range(50)]
    torch.testing.assert_close(torch.stack(found).cpu(), torch.tensor(expected, dtype=torch.float64))
