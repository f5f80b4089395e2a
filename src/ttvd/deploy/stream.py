"""The loop of deployment: adapt to a stream batch by batch, write predictions, save states."""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from ttvd.deploy.inputs import Batch, Inputs, OnUnreadable, iterate_batches
from ttvd.deploy.predictions import PredictionWriter, check_output, partial_path
from ttvd.deploy.states import Position, StateFile
from ttvd.files import is_same_file, remove_unfinished
from ttvd.interrupts import defer_interrupts
from ttvd.methods import Adapter, GuardStatus
from ttvd.methods.shared.losses import entropy


@dataclass(frozen=True, eq=False)
class BatchResult:
    """What happened to one batch.

    Attributes:
        index: Number of the batch in this run, from 0.
        position: How far the stream is after the batch.
        names: Names of the images that were predicted, b of them.
        logits: Logits (b, k) in float32, on the device of the adapter; (0, 0) if no image was readable.
        predictions: Predicted class of each image.
        confidences: Probability of each predicted class.
        entropy: Mean entropy of the predictions, divided by ln k; NaN if no image was readable.
        kept: Share of the batch that was used to adapt; NaN if no image was readable.
        unreadable: Name and reason of each image that was left out.
    """

    index: int
    position: Position
    names: Sequence[str]
    logits: Tensor
    predictions: Sequence[int]
    confidences: Sequence[float]
    entropy: float
    kept: float
    unreadable: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class StreamSummary:
    """What happened along a stream.

    Attributes:
        entropies: Mean entropy of the predictions of each batch, divided by ln k.
        kept: Share of each batch that was used to adapt.
        histogram: Number of predictions of each class.
        unreadable: Name and reason of each image that was left out.
        moved: Distance of the adapted parameters from their values at the start of this run, divided by the norm of
            those values.
        rows: Number of predictions in the file, those of earlier runs included.
        guard: What the guard of the adapter saw and did, from the beginning of its state; None without a guard.
    """

    entropies: Sequence[float]
    kept: Sequence[float]
    histogram: Mapping[int, int]
    unreadable: Sequence[tuple[str, str]]
    moved: float
    rows: int
    guard: GuardStatus | None = None

    @property
    def images(self) -> int:
        """Number of images that this run predicted."""
        return sum(self.histogram.values())


def adapt_stream(
    adapter: Adapter,
    inputs: Inputs,
    *,
    out: Path | None = None,
    classes: Sequence[str] | None = None,
    batch_size: int = 64,
    on_unreadable: OnUnreadable = "stop",
    state: StateFile | None = None,
    resume: bool = False,
    overwrite: bool = False,
    callbacks: Sequence[Callable[[BatchResult], None]] = (),
) -> StreamSummary:
    """Predict a stream of images in order and adapt on the way.

    The rows of a batch are in ``<out>.partial`` before its callbacks are called, and a kill of the process does not
    lose them. Every 100 batches (or ``state.every``), at the end and when the stream is interrupted, the disk is made
    to have them, and a state that counts them is saved. After a power cut the rows up to there are left.

    With ``state`` a stream that was interrupted in any way can be resumed, and the file is then the same as without
    the interruption, byte by byte. A stream that had ended is resumed by doing nothing. Ctrl-C and SIGTERM wait for
    the end of the batch, because nobody knows whether a batch that is cut off has changed the adapter; a second signal
    does not wait. Where a batch is cut off or fails, the state that was saved before it stays. Signals are handled in
    the main thread only. A note of the exception says how many rows are left (``error.__notes__``).

    Args:
        adapter: The adapter. It adapts in place.
        inputs: Images to predict, see :func:`ttvd.deploy.open_inputs`.
        out: ``.csv`` or ``.parquet`` file for the predictions; None writes no file.
        classes: Names of the classes, which add a column to the file.
        batch_size: Number of images that are predicted together.
        on_unreadable: ``"stop"`` raises at an image that cannot be used, ``"skip"`` leaves it out.
        state: File that the state is saved to: before the first batch, every ``state.every`` batches, and at the end.
            A file that exists is replaced.
        resume: Continue an interrupted run from ``state`` and the rows that it wrote. Rows that the state does not
            count are cut off and computed again.
        overwrite: Replace ``out`` if it exists, and the rows of an interrupted run.
        callbacks: Functions that are called after each batch. A callback that raises an exception ends the stream
            after this batch; the state is saved.

    Returns:
        A summary of this run.

    Raises:
        BlockingIOError: Another process is writing ``out``.
        FileExistsError: ``out`` exists, and neither ``resume`` nor ``overwrite`` is set.
        KeyboardInterrupt: The user stopped the stream.
        OSError: A file cannot be written.
        ValueError: The images do not fit the model, or the run cannot be resumed.

    Example:
        >>> import ttvd
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
        >>> images = torch.rand(10, 1, 2, 2)
        >>> inputs = Inputs([f"{i}.png" for i in range(10)], images.__getitem__)
        >>> report = lambda result: print(result.index, len(result.predictions))
        >>> summary = adapt_stream(ttvd.create("tent", net), inputs, batch_size=4, callbacks=[report])
        0 4
        1 4
        2 2
        >>> summary.images
        10
    """
    stream = _describe_stream(inputs, batch_size, classes, out)
    _check_paths(out, state, resume)
    position = state.resume(adapter, stream) if state is not None and resume else Position()
    _check_left_out(position, on_unreadable)
    summary, writer = _SummaryBuilder(adapter), None
    if out is not None:
        writer = PredictionWriter(
            out, classes=classes, resume=position if resume else None, overwrite=overwrite
        )
    saver = _Saver(adapter, state, stream, writer, position)
    loader = iterate_batches(inputs, batch_size, on_unreadable=on_unreadable, start=position.images)
    with closing(loader) as batches, defer_interrupts() as interrupt, saver:
        for index, batch in enumerate(batches):
            saver.begin_batch()
            logits = torch.empty(0, 0)
            if batch.images is not None:
                weight = adapter.probe
                with _explain_shape(batch.images):
                    logits = adapter(batch.images.to(weight.device, weight.dtype)).float()
                _check_classes(classes, logits)
            position = Position(batch.stop, position.rows + len(batch.positions))
            result = _describe(index, position, batch, inputs, logits, adapter)
            saver.end_batch(result)
            summary.add(result)
            for callback in callbacks:
                callback(result)
            if interrupt.requested:
                raise KeyboardInterrupt
    return summary.build(position.rows)


class _Saver:
    """Keeps the rows and the state of a stream together.

    The order is what makes every moment safe for a kill or a power cut: rows are appended and synced, then the state
    that counts them replaces the one before. So the rows that the state on the disk counts are always there. A state
    before the first row is saved before the journal is touched. The journal gets its final name after the state of
    the end was saved.

    A stream also ends by an exception. If that happens within a batch, the adapter may be ahead of the rows, and the
    state that was saved before stays.
    """

    def __init__(
        self,
        adapter: Adapter,
        state: StateFile | None,
        stream: Mapping[str, str],
        writer: PredictionWriter | None,
        position: Position,
    ) -> None:
        self._adapter, self._state, self._stream, self._writer = adapter, state, stream, writer
        self._position = self._saved = position
        self._every = StateFile.every if state is None else state.every
        self._within_batch = self._has_failed = False
        self._batches = 0

    def __enter__(self) -> Self:
        try:
            if self._state is not None:
                remove_unfinished(self._state.path)
            self._save_state()
            if self._writer is not None:
                self._writer.begin()
        except BaseException as error:
            self._leave(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            self._save_last()
            if self._writer is not None and error is None:
                self._writer.finish()
        except BaseException as last:
            error = last
            raise
        finally:
            self._leave(error)

    def begin_batch(self) -> None:
        self._within_batch = True

    def end_batch(self, result: BatchResult) -> None:
        if self._writer is not None:
            self._writer.write(result.names, result.predictions, result.confidences)
        self._position, self._within_batch = result.position, False
        self._batches += 1
        if self._batches % self._every == 0:
            self._save()

    def _save_last(self) -> None:
        is_whole = self._state is None or not self._within_batch  # rows alone are whole at any time
        if is_whole and not self._has_failed and self._position != self._saved:
            self._save()

    def _save(self) -> None:
        self._has_failed = True  # a sync that has failed once says nothing when it succeeds later
        if self._writer is not None:
            self._writer.sync()
        self._save_state()
        self._saved, self._has_failed = self._position, False

    def _save_state(self) -> None:
        if self._state is not None:
            position = self._position
            if self._writer is not None:
                position = replace(position, size=self._writer.size, checksum=self._writer.checksum)
            self._state.save(self._adapter, position, self._stream)

    def _leave(self, error: BaseException | None) -> None:
        """Let go of the journal. Say which rows are left where the stream did not reach its end."""
        if self._writer is None:
            return
        if error is not None and self._saved.rows:
            hint = "" if self._state is None else "; --resume continues after them (in Python resume=True)"
            error.add_note(f"{self._saved.rows} rows are in {self._writer.partial}{hint}")
        elif (
            error is not None and self._position.rows == 0 and (not self._state or not self._position.images)
        ):
            with suppress(OSError):  # the error itself says more
                self._writer.discard()
        self._writer.close()


class _SummaryBuilder:
    def __init__(self, adapter: Adapter) -> None:
        self._adapter, self._start = adapter, adapter.snapshot()
        self._entropies: list[float] = []
        self._kept: list[float] = []
        self._histogram: Counter[int] = Counter()
        self._unreadable: list[tuple[str, str]] = []

    def add(self, result: BatchResult) -> None:
        self._unreadable += result.unreadable
        self._histogram.update(result.predictions)
        if result.names:
            self._entropies.append(result.entropy)
            self._kept.append(result.kept)

    def build(self, rows: int) -> StreamSummary:
        moved = _measure_move(self._adapter, self._start)
        return StreamSummary(
            self._entropies,
            self._kept,
            self._histogram,
            self._unreadable,
            moved,
            rows,
            self._adapter.status,
        )


def _describe_stream(
    inputs: Inputs, batch_size: int, classes: Sequence[str] | None, out: Path | None
) -> dict[str, str]:
    """Describe everything that the rows depend on beside the adapter. A stream is resumed with the same only."""
    named = "none"
    if classes is not None:
        digest = hashlib.sha256("\n".join(classes).encode(errors="surrogatepass")).hexdigest()
        named = f"{len(classes)} names, {digest[:12]}"
    written = "none" if out is None else out.suffix
    return {"input": inputs.identity, "batch size": str(batch_size), "classes": named, "output": written}


def _check_paths(out: Path | None, state: StateFile | None, resume: bool) -> None:
    """Refuse paths that cannot be written to, and one path for two things."""
    if state is None:
        if resume:
            raise ValueError("to resume a stream, pass the file that its state was saved to")
        return
    if out is not None and is_same_file(state.path, out, partial_path(out)):
        raise ValueError(f"the state and the predictions cannot both be written to {state.path}")
    check_output(state.path, overwrite=True)


def _check_left_out(position: Position, on_unreadable: OnUnreadable) -> None:
    if on_unreadable == "stop" and position.images != position.rows:
        raise ValueError(
            f"the run that is resumed has left out {position.images - position.rows} images that cannot be used, and "
            "this run would stop at them; resume with --unreadable skip (in Python on_unreadable='skip')"
        )


@contextmanager
def _explain_shape(images: Tensor) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        # The first batch of a shape is tried by the adapter, which explains the error of the model.
        reason = error.__cause__ if isinstance(error, ValueError) else error
        if not isinstance(reason, RuntimeError):
            raise
        raise ValueError(
            f"the model cannot take images of size {tuple(images.shape[1:])}: {str(reason).splitlines()[0]} (--size, "
            "or --resize and --crop, change the size of pictures, --gray makes one channel)"
        ) from error


def _check_classes(classes: Sequence[str] | None, logits: Tensor) -> None:
    if classes is not None and len(classes) != logits.shape[1]:
        raise ValueError(
            f"there are {len(classes)} names of classes, but the model has {logits.shape[1]} outputs"
        )


def _describe(
    index: int, position: Position, batch: Batch, inputs: Inputs, logits: Tensor, adapter: Adapter
) -> BatchResult:
    names = [inputs.names[p] for p in batch.positions]
    unreadable = [(inputs.names[p], reason) for p, reason in batch.unreadable]
    if not names:
        return BatchResult(index, position, names, logits, [], [], math.nan, math.nan, unreadable)
    confidences, predictions = (values.tolist() for values in logits.softmax(1).max(1))
    share = float(entropy(logits).mean()) / math.log(max(logits.shape[1], 2))
    kept = float(adapter.kept)
    return BatchResult(index, position, names, logits, predictions, confidences, share, kept, unreadable)


def _measure_move(adapter: Adapter, start: Mapping[str, Tensor]) -> float:
    """Return how far the adapted parameters are from where they started, relative to their norm at the start."""
    names = [name for name, p in adapter.named_parameters() if p.requires_grad]
    if not names:
        return 0.0
    now = adapter.snapshot()
    change = sum(float((now[name] - start[name]).double().square().sum()) for name in names)
    norm = sum(float(start[name].double().square().sum()) for name in names)
    return math.sqrt(change / norm) if norm > 0 else math.inf
